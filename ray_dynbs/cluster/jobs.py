"""The job server of a cluster: a job of ours is packed, submitted, followed and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ray_dynbs.cluster.authentication import ANSWER_S, INSTALL, authenticate
from ray_dynbs.cluster.package import Package
from ray_dynbs.core.errors import ConfigError

STOP_S = 30
"""What a stopped job has for its way out before Ray kills it: checkpoints and processes are put in order."""
LOST_S = 60.0
"""Longest wait for a job server that no longer answers; the job itself goes on."""
YOUNG_S = 30.0
"""How long a head node that has just started is given to get ready for jobs."""


class Jobs:
    """A connection to a job server.

    Args:
        address: ``http://HOST:8265``, where the cluster's dashboard is.

    Raises:
        ConfigError: the address is none, nobody answers there in time, or the token is missing or wrong.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        _check_scheme(self.address)
        _ask(self.address)
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # Ray would take these instead of the address
            os.environ.pop(name, None)
        from ray.job_submission import JobSubmissionClient

        logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.ERROR)
        logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.ERROR)
        self._client: Any = JobSubmissionClient(self.address)

    def submit(
        self, name: str, command: Sequence[str], package: Package, runtime_env: Mapping[str, Any]
    ) -> str:
        """Send a package and start a command in it; returns the job's id.

        Args:
            name: What to call the job; a few characters are appended.
            command: Arguments, the program first.
            package: What is sent.
            runtime_env: More of Ray's runtime environment.

        Raises:
            ConfigError: the package is too large, or the runtime environment is none.
        """
        job = f"{re.sub(r'[^A-Za-z0-9_-]+', '-', name)}-{uuid.uuid4().hex[:6]}"
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S), **runtime_env.get("env_vars", {})}
        with TemporaryDirectory() as folder:
            archive = Path(folder) / "package.zip"
            package.write(archive)
            environment = {**runtime_env, "working_dir": str(archive), "env_vars": variables}
            try:
                self._submit(job, shlex.join(command), environment)
            except (ValueError, TypeError, RuntimeError) as error:
                raise ConfigError(f"{self.address}: {' '.join(str(error).split())}") from error
        return job

    def _submit(self, job: str, entrypoint: str, runtime_env: dict[str, Any]) -> None:
        deadline = time.monotonic() + YOUNG_S
        while True:
            try:
                self._client.submit_job(
                    entrypoint=entrypoint, submission_id=job, runtime_env=dict(runtime_env)
                )
                return
            except RuntimeError as error:
                if "No available agent" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(1)

    def follow(self, job: str, echo: Callable[[str], None]) -> int:
        """Hand on what a job prints until it ends; returns its exit code.

        Raises:
            ConnectionError: the job server is gone; the job may still run.
            KeyboardInterrupt: as it comes; the job goes on.
        """
        shown, lost_at = 0, None
        while True:
            with contextlib.suppress(Exception):  # a broken connection is taken up again below
                shown = asyncio.run(self._show_logs(job, shown, echo))
                lost_at = None
            try:
                code = self.exit_code(job)
            except (OSError, RuntimeError) as error:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > LOST_S:
                    raise ConnectionError(
                        f"{self.address}: no longer answers; {job} may still run"
                    ) from error
                code = None
            if code is not None:
                return code
            time.sleep(0.5)

    async def _show_logs(self, job: str, shown: int, echo: Callable[[str], None]) -> int:
        """Hand on a log that begins anew with every connection; returns how much of it is shown."""
        seen = 0
        async for text in self._client.tail_job_logs(job):
            fresh = text[max(shown - seen, 0) :]
            seen += len(text)
            if fresh:
                echo(fresh)
            shown = max(shown, seen)
        return shown

    def exit_code(self, job: str) -> int | None:
        """The exit code of a job that has ended, 130 if it was stopped; ``None`` while it runs."""
        details = self._client.get_job_info(job)
        if not details.status.is_terminal():
            return None
        if details.status == "STOPPED":
            return 130
        if details.driver_exit_code is not None:
            return int(details.driver_exit_code)
        return 0 if details.status == "SUCCEEDED" else 1

    def why(self, job: str) -> str:
        """What Ray says about a job that did not get as far as to speak for itself."""
        details = self._client.get_job_info(job)
        if details.driver_exit_code is not None or details.status != "FAILED":
            return ""
        return " ".join(str(details.message or "").split())

    def stop(self, job: str) -> None:
        """Ask a job to end as by Ctrl-C."""
        self._client.stop_job(job)


def _check_scheme(address: str) -> None:
    """See that an address is one of a job server.

    Raises:
        ConfigError: it is not; says what it may be.
    """
    if address.startswith(("http://", "https://")):
        return
    scheme, separator, rest = address.rpartition("://")
    host, _, port = rest.partition(":")
    what = f"{scheme}:// is no job server's" if separator else "no scheme"
    port = "8265" if separator else port or "8265"
    raise ConfigError(f"--address is {address!r}: {what}; allowed: http://{host or 'HOST'}:{port}")


def _ask(address: str) -> None:
    """See that a job server answers, and give it the token if it asks for one.

    Raises:
        ConfigError: nobody answers, or something else does.
    """
    try:
        import aiohttp  # noqa: F401  # what Ray's own client needs
        import requests
        from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
    except ImportError as error:
        raise ConfigError(f"submitting needs {error.name}; allowed: {INSTALL}") from error
    answer = requests.Response()

    def is_refused() -> bool:
        nonlocal answer
        headers = get_auth_headers_if_auth_enabled({})
        answer = requests.get(f"{address}/api/version", headers=headers, timeout=ANSWER_S)
        return answer.status_code in (401, 403)

    try:
        authenticate(address, is_refused)
    except requests.RequestException as error:
        raise ConfigError(f"{address}: no job server answers there ({_short(error)})") from error
    if answer.status_code != 200 or "ray_version" not in answer.text:
        raise ConfigError(f"{address}: no Ray job server answers there (HTTP {answer.status_code})")


def _short(error: BaseException) -> str:
    """The innermost reason of a failed request."""
    text = str(error)
    known = {
        "Connection refused": "connection refused",
        "timed out": f"no answer within {ANSWER_S:g} s",
        "Name or service not known": "no such host",
        "BadStatusLine": "something else answers",
    }
    return next((why for words, why in known.items() if words in text), " ".join(text.split())[:200])
