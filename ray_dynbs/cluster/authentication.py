"""The token of a cluster: found where Ray looks for it, sent only to a cluster that asks for one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray_dynbs.core.errors import ConfigError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
USUAL = "~/.ray/auth_token"
PLACES = f"{TOKEN}, {TOKEN_PATH} or {USUAL}"
ANSWER_S = 5.0
"""Longest wait for an answer of a cluster, seconds."""
INSTALL = "pip install 'ray-dynbs[cluster]'"
"""What brings Ray Client and the job server's client."""


def authenticate(address: str, is_refused: Callable[[], bool]) -> None:
    """Make this process send its token, if the cluster asks for one.

    Ray itself goes by the environment only, and takes a refusal for a cluster that does not answer.

    Args:
        address: The cluster's, for complaints.
        is_refused: Asks the cluster for something, and says whether it wanted another token, or one at all.

    Raises:
        ConfigError: there is no token, it is the wrong one, or the environment says to send none.
    """
    sent = os.environ.get(MODE, "").lower() == "token"
    if sent and not token_source():
        raise ConfigError(f"{address}: {MODE} is 'token', but no token was found; allowed: one in {PLACES}")
    if not is_refused():
        return
    if not sent:
        _send_token(address)
        if not is_refused():
            return
    raise ConfigError(
        f"{address}: does not accept the token from {token_source()}; allowed: the cluster's own, in {PLACES}"
    )


def token_source() -> str:
    """Where Ray takes the token from; empty where there is none."""
    if os.environ.get(TOKEN):
        return TOKEN
    named = os.environ.get(TOKEN_PATH)
    if named:
        return f"{TOKEN_PATH}={named}" if Path(named).expanduser().is_file() else ""
    return USUAL if Path(USUAL).expanduser().is_file() else ""


def _send_token(address: str) -> None:
    if not token_source():
        named = os.environ.get(TOKEN_PATH)
        found = f"{TOKEN_PATH}={named} is no file" if named else "none was found"
        raise ConfigError(f"{address}: asks for a token, {found}; allowed: one in {PLACES}")
    if os.environ.get(MODE):
        raise ConfigError(f"{address}: asks for a token, {MODE} is {os.environ[MODE]!r}; allowed: 'token'")
    os.environ[MODE] = "token"
    _sent.append(address)
    _read_environment_anew()


def forget() -> None:
    """Send the token no longer, if it was sent because a cluster asked for it: the next one is asked too."""
    if _sent:
        _sent.clear()
        os.environ.pop(MODE, None)
        _read_environment_anew()


_sent: list[str] = []
"""Clusters that asked for it."""


def _read_environment_anew() -> None:
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")  # Ray has read it once, when it was imported
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def call_grpc(target: str, method: str, request: bytes = b"") -> str:
    """Make one call, with the token if this process sends it; returns its status, as ``OK``.

    Args:
        target: ``host:port``.
        method: ``/package.Service/Method``.
        request: The message, encoded.

    Raises:
        ImportError: there is no grpc.
    """
    import grpc
    from ray._private.grpc_utils import init_grpc_channel

    with init_grpc_channel(target) as channel:
        call = channel.unary_unary(method)
        try:
            call(request, timeout=ANSWER_S, metadata=[("client_id", "ray-dynbs")])
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"
