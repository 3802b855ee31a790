"""The job server of a cluster: a job of ours is packed, submitted, followed and stopped."""

from __future__ import annotations

import asyncio
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
        self._begun = self._shown = 0

    def submit(
        self, job: str, command: Sequence[str], package: Package, runtime_env: Mapping[str, Any]
    ) -> None:
        """Send a package and start a command in it.

        Args:
            job: The job's id, see :func:`new_job`.
            command: Arguments, the program first.
            package: What is sent.
            runtime_env: More of Ray's runtime environment.

        Raises:
            ConfigError: the package is too large, the runtime environment is none, or nobody answers.
        """
        import requests

        variables = runtime_env.get("env_vars") or {}
        if not isinstance(variables, dict):
            raise ConfigError(f"runtime environment: env_vars is {variables!r}; allowed: a mapping")
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S), **variables}
        with TemporaryDirectory() as folder:
            archive = Path(folder) / "package.zip"
            package.write(archive)
            environment = {**runtime_env, "working_dir": str(archive), "env_vars": variables}
            try:
                self._submit(job, shlex.join(command), environment)
            except (ValueError, TypeError, RuntimeError, requests.RequestException) as error:
                raise ConfigError(f"{self.address}: {' '.join(str(error).split())}") from error

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

        It may be called again, after an interrupt: nothing is handed on twice.

        Raises:
            ConnectionError: the job server is gone; the job may still run.
            KeyboardInterrupt: as it comes; the job goes on.
        """
        while True:
            try:
                whole = self._tail(job, echo)
                code = self.exit_code(job)
            except ConnectionError:
                whole, code = False, self._patiently(lambda: self.exit_code(job), job)
            if code is not None:
                if not whole:
                    self._show(str(self._patiently(lambda: self._client.get_job_logs(job), job)), echo)
                return code
            time.sleep(0.5)

    def _tail(self, job: str, echo: Callable[[str], None]) -> bool:
        """Hand on the log as it grows; whether it was followed to its end."""
        import aiohttp

        async def tail() -> None:
            self._begun = 0  # every connection begins with the first line
            async for text in self._client.tail_job_logs(job):
                self._begun += len(text)
                self._show_end(text, echo)

        try:
            asyncio.run(tail())
        except (aiohttp.ClientError, OSError, RuntimeError):  # taken up again by the caller
            return False
        return True

    def _show_end(self, text: str, echo: Callable[[str], None]) -> None:
        """Hand on what is new of a piece that ends where :attr:`_begun` is."""
        fresh = text[max(len(text) - (self._begun - self._shown), 0) :] if self._begun > self._shown else ""
        self._shown = max(self._shown, self._begun)
        if fresh:
            echo(fresh)

    def _show(self, log: str, echo: Callable[[str], None]) -> None:
        """Hand on what is new of a whole log."""
        self._begun = len(log)
        self._show_end(log, echo)

    def _patiently(self, ask: Callable[[], Any], job: str) -> Any:
        """An answer of a server that may be away for a moment.

        Raises:
            ConnectionError: it stayed away.
        """
        deadline = time.monotonic() + LOST_S
        while True:
            try:
                return ask()
            except (ConnectionError, RuntimeError) as error:
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"{self.address}: no longer answers; {job} may still run"
                    ) from error
            time.sleep(1)

    def exit_code(self, job: str) -> int | None:
        """The exit code of a job that has ended, 130 if it was stopped; ``None`` while it runs.

        Raises:
            ConnectionError: the job server does not answer.
        """
        details = self._ask_about(job)
        if not details.status.is_terminal():
            return None
        if details.status == "STOPPED":
            return 130
        if details.driver_exit_code is not None:
            return int(details.driver_exit_code)
        return 0 if details.status == "SUCCEEDED" else 1

    def why(self, job: str) -> str:
        """What Ray says about a job that did not get as far as to speak for itself.

        Raises:
            ConnectionError: the job server does not answer.
        """
        details = self._ask_about(job)
        if details.driver_exit_code is not None or details.status != "FAILED":
            return ""
        return " ".join(str(details.message or "").split())

    def stop(self, job: str) -> None:
        """Ask a job to end as by Ctrl-C.

        Raises:
            ConnectionError: the job server does not answer.
        """
        import requests

        try:
            self._client.stop_job(job)
        except (requests.RequestException, RuntimeError) as error:
            raise ConnectionError(f"{self.address}: {job} was not stopped ({_short(error)})") from error

    def _ask_about(self, job: str) -> Any:
        import requests

        try:
            return self._client.get_job_info(job)
        except requests.RequestException as error:
            raise ConnectionError(f"{self.address}: {_short(error)}") from error


def new_job(name: str) -> str:
    """An id for a job: a name, and a few characters that no other has."""
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', name)}-{uuid.uuid4().hex[:6]}"


def _check_scheme(address: str) -> None:
    """See that an address is one of a job server.

    Raises:
        ConfigError: it is not; says what it may be.
    """
    if re.match(r"https?://[^/]", address, re.IGNORECASE):
        return
    scheme, separator, rest = address.rpartition("://")
    host, port = re.match(r"(\[[^]]*\]|[^:/]*):?(\d*)", rest).groups()  # type: ignore[union-attr]
    if scheme.lower() in ("http", "https"):
        what, port = "no host", ""
    else:
        what = f"{scheme}:// is no job server's" if separator else "no scheme"
        port = "" if separator else port
    raise ConfigError(f"--address is {address!r}: {what}; allowed: http://{host or 'HOST'}:{port or 8265}")


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
        "ProxyError": "the proxy of HTTP_PROXY or HTTPS_PROXY does not answer; NO_PROXY passes by it",
        "Connection refused": "connection refused",
        "timed out": f"no answer within {ANSWER_S:g} s",
        "Name or service not known": "no such host",
        "BadStatusLine": "something else answers",
    }
    return next((why for words, why in known.items() if words in text), " ".join(text.split())[:200])
