"""Joining a cluster, or starting a private one for the length of a run."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray_dynbs.cluster.authentication import ANSWER_S, authenticate, call_grpc
from ray_dynbs.core.errors import ConfigError

DRIVER_SETTINGS = {
    # `train.report` is a barrier that the controller drains once per interval: 2 s by default.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    # Ray warns at every start that a future release will change how it hides accelerators.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@contextmanager
def ray_session(address: str | None, *, verbose: bool = False) -> Iterator[None]:
    """A connection to ``address``, or to ``RAY_ADDRESS``, or to a new local cluster.

    It never joins a cluster that merely happens to run on this host. A local cluster lives in a
    private temporary folder, which keeps it apart from others, and ends with the block.

    Raises:
        ConfigError: there is no cluster at the address, or it does not accept the token.
    """
    for key, value in DRIVER_SETTINGS.items():
        os.environ.setdefault(key, value)
    key = "cluster.address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    where = f"{key} is {address!r}"
    folder = _short_folder() if address == "local" else None
    if folder:
        os.environ["RAY_TMPDIR"] = folder
    else:
        _see_that_it_answers(address, where)

    import ray  # only now: it reads its temporary folder from the environment when imported

    local: dict[str, Any] = {"include_dashboard": False, "_temp_dir": folder} if folder else {}
    try:
        ray.init(
            address=address,
            log_to_driver=verbose,
            logging_level=logging.INFO if verbose else logging.ERROR,
            **local,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:  # RuntimeError: other versions
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
    _end_on_sigterm()
    _quiet_data(verbose)
    try:
        yield
    finally:
        if not verbose:  # a pipeline that was interrupted complains once the cluster ends, which is no news
            logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _short_folder() -> str:
    """A new temporary folder whose name leaves room for Ray's sockets (a path of 107 bytes at most)."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="rdb-", dir="/tmp" if len(usual) > 20 and os.path.isdir("/tmp") else usual)


def _see_that_it_answers(address: str, where: str) -> None:
    """Ray waits for minutes where nobody listens, or where it is refused; either is known at once.

    Raises:
        ConfigError: nobody listens, or the token is missing or wrong.
    """
    if "://" in address:
        raise ConfigError(
            f"{where}: not a driver's; allowed: HOST:6379 on a machine of the cluster, or from elsewhere "
            "ray-dynbs submit (http://), ray_dynbs.connect (ray://)"
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise ConfigError(f"{where}: nobody answers there ({error})") from error
    method = "/ray.rpc.NodeInfoGcsService/GetClusterId"
    with contextlib.suppress(ImportError):  # without grpc, Ray finds out for itself
        authenticate(where, lambda: call_grpc(address, method) == "UNAUTHENTICATED")


def _end_on_sigterm() -> None:
    """Take SIGTERM as Ctrl-C: Ray's own handler prints a stack dump and aborts."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))


def _quiet_data(verbose: bool) -> None:
    """Keep Ray Data's progress bars and plans out of the run's own lines."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = verbose
    context.print_on_execution_start = verbose
    if not verbose:
        for name in ("ray.data", "ray.train"):
            logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a failed trial is told in one line
