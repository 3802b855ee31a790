"""A connection over Ray Client: checked step by step, so that what is wrong is said in one line."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import socket
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray

from ray_dynbs.cluster.authentication import ANSWER_S, INSTALL, authenticate, call_grpc, forget
from ray_dynbs.cluster.package import make_package
from ray_dynbs.cluster.session import ray_session
from ray_dynbs.core.errors import ConfigError

SCHEME = "ray://"
PORT_TAKEN, ATTEMPTS = "Starting Ray client server failed", 3


class Connection:
    """To a cluster by Ray Client, or a private one on this machine; one at a time.

    Args:
        address: ``ray://HOST:10001``, or ``local``.
        working_dir: Folder whose files the cluster gets beside this package: tasks, data; ``None`` for none.
        runtime_env: More of Ray's runtime environment, e.g. ``{"pip": [...]}``.

    Raises:
        ConfigError: the address is none, nobody answers there, the token is missing or wrong, or Python or
            Ray are others there.
    """

    def __init__(
        self, address: str, working_dir: str | Path | None, runtime_env: Mapping[str, Any] | None
    ) -> None:
        self.address = address
        if ray.is_initialized():
            raise ConfigError("Ray is connected already; allowed: ray.shutdown() before connecting anew")
        with ExitStack() as stack:
            if address == "local":
                stack.enter_context(ray_session("local"))
            else:
                stack.callback(forget)
                self._connect(address, working_dir, runtime_env)
                stack.callback(ray.shutdown)
            self._open = stack.pop_all()

    @staticmethod
    def _connect(address: str, working_dir: str | Path | None, runtime_env: Mapping[str, Any] | None) -> None:
        target = _target(address)
        _check_listening(address, target)
        _check_answer(address, target)
        os.environ.pop("RAY_ADDRESS", None)  # Ray would take it instead of the address
        if "working_dir" in (runtime_env or {}):
            raise ConfigError("runtime_env: working_dir is set; allowed: connect(..., working_dir=FOLDER)")
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(working_dir) if working_dir is not None else Path(scratch)
            archive = Path(scratch) / "package.zip"
            make_package(folder).write(archive)
            _connect(address, {**(runtime_env or {}), "working_dir": str(archive)})

    def __repr__(self) -> str:
        return f"<connection to {self.address}>"

    def close(self) -> None:
        """Disconnect; runs in progress go on, but on a private cluster, which ends."""
        self._open.close()


def _target(address: str) -> str:
    """Host and port of a Ray Client address.

    Raises:
        ConfigError: it is another kind of address, or none.
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        host, _, port = address.partition(":")
        raise ConfigError(
            f"address is {address!r}: no scheme; allowed: {SCHEME}{host or 'HOST'}:{port or 10001}, or local"
        )
    if scheme != "ray":
        host = rest.partition(":")[0].partition("/")[0]
        raise ConfigError(
            f"address is {address!r}: not Ray Client's; allowed: {SCHEME}{host}:10001 (to submit jobs over "
            "http: ray-dynbs submit)"
        )
    host, _, port = rest.rstrip("/").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"address is {address!r}: no host and port; allowed: {SCHEME}HOST:10001")
    return f"{host}:{port}"


def _check_listening(address: str, target: str) -> None:
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise ConfigError(
            f"{address}: nobody listens there ({reason.lower()}); Ray Client's port is 10001 as a rule"
        ) from error


def _check_answer(address: str, target: str) -> None:
    """See that Ray Client answers, and give it the token if it asks for one.

    Raises:
        ConfigError: it does not, or the token is missing or wrong.
    """
    try:
        messages: Any = importlib.import_module("ray.core.generated.ray_client_pb2")
        request = messages.ClusterInfoRequest(type=messages.ClusterInfoType.PING).SerializeToString()
        status = ""

        def is_refused() -> bool:
            nonlocal status
            status = call_grpc(target, "/ray.rpc.RayletDriver/ClusterInfo", request)
            return status == "UNAUTHENTICATED"

        authenticate(address, is_refused)
    except ImportError as error:
        raise ConfigError(f"connecting needs {error.name}; allowed: {INSTALL}") from error
    if status != "OK":
        raise ConfigError(f"{address}: no Ray Client answers there ({status}); its port is 10001 as a rule")


def _connect(address: str, runtime_env: Mapping[str, Any]) -> None:
    """Connect, whatever versions there are on the other side, and then see that they are those of this one.

    Raises:
        ConfigError: they are not, or Ray gave up.
    """
    for name in ("ray.util.client", "ray._private.runtime_env"):
        logging.getLogger(name).setLevel(logging.ERROR)
    checks_itself = "RAY_IGNORE_VERSION_MISMATCH" not in os.environ
    if checks_itself:
        os.environ["RAY_IGNORE_VERSION_MISMATCH"] = "1"  # Ray's complaint has eight lines
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context = _init(address, runtime_env)
    except (ConnectionError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{address}: {' '.join(str(error).split())}") from error
    finally:
        if checks_itself:
            del os.environ["RAY_IGNORE_VERSION_MISMATCH"]
    here, there = versions(), (context.python_version, context.ray_version)
    same_python = here[0].split(".")[:2] == there[0].split(".")[:2]
    if checks_itself and not (same_python and here[1] == there[1]):
        ray.shutdown()
        raise ConfigError(
            f"{address}: runs Python {there[0]} and Ray {there[1]}, "
            f"here are Python {here[0]} and Ray {here[1]}; "
            f"allowed: the same Ray and Python {'.'.join(there[0].split('.')[:2])}"
        )


def _init(address: str, runtime_env: Mapping[str, Any]) -> Any:
    """Connect; the head gives every client a server of its own, on the next port, which may be taken."""
    for attempt in range(ATTEMPTS):
        try:
            return ray.init(
                address, runtime_env=dict(runtime_env), log_to_driver=False, logging_level=logging.ERROR
            )
        except ConnectionError as error:
            ray.shutdown()
            if PORT_TAKEN not in str(error) or attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def versions() -> tuple[str, str]:
    """Of Python and Ray, here."""
    return platform.python_version(), ray.__version__
