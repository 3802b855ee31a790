"""A run's driver on the cluster: an actor that outlives whoever started it, and ends itself.

The driver proper is the command, in a process of its own as everywhere else; the actor keeps what it says
for those who follow, now or later. Ray calls the actor by the run's name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.storage.run_directory import CONFIG, RunDirectory, lasting

NAMESPACE = "ray_dynbs"
RUN_KIND, SEARCH_KIND = "train", "tune"
HEAD = {"node:__internal_head__": 0.001}
"""The node where jobs have their drivers too, and whose disk holds a run directory that is no URI."""
LINGER_S = 600.0
"""How long a driver that has ended waits to be asked about it."""
WAIT_S = 1.0
"""Longest wait for news within one call."""
MOST_CALLS = 16
STOPPED = 130
"""Exit code of a command that was interrupted."""
GONE_S = 15.0
"""Longest wait for the name of a driver that has ended."""
STOP_S = 60.0
"""What a stopped driver has for its way out before it is killed."""


class Driver:
    """The command in a process, and the lines it has printed so far.

    Args:
        name: Of the run.
        arguments: Of the command, but for the file.
        content: Of the file that the command reads, its last argument.
    """

    def __init__(self, name: str, arguments: Sequence[str], content: str) -> None:
        self._content = content
        self._lines: list[str] = []
        self._changed, self._dismissed = threading.Condition(), threading.Event()
        self._code: int | None = None
        self._stopped = False
        self._folder = TemporaryDirectory(prefix="ray-dynbs-")
        file = Path(self._folder.name) / f"{name}.yaml"
        file.write_text(content)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ray_dynbs.cli.main", arguments[0], str(file), *arguments[1:], "--events"],
            stdin=subprocess.PIPE,  # which closes when this process ends, however it does
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_environment(),
            start_new_session=True,
        )

    def run(self) -> None:
        """Take down what the command prints; after its end wait for those who want to know, and end."""
        output: Any = self._process.stdout
        for line in output:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._code = STOPPED if self._process.wait() < 0 and self._stopped else self._process.returncode
            self._changed.notify_all()
        self._folder.cleanup()
        self._dismissed.wait(LINGER_S)
        ray.actor.exit_actor()

    def news(self, after: int) -> tuple[list[str], int | None]:
        """The lines after the first ``after`` of them, and the exit code, ``None`` while it runs.

        Waits a moment where there is nothing new.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) > after or self._code is not None, WAIT_S)
            return self._lines[after:], self._code

    def content(self) -> str:
        """Of the file that the command reads."""
        return self._content

    def stop(self) -> None:
        """End the command as by Ctrl-C; by force where that takes too long."""
        self._stopped = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
                return
            self._process.kill()

    def dismiss(self) -> None:
        """Its end is known: nobody will ask again."""
        self._dismissed.set()


def _environment() -> dict[str, str]:
    """That of a driver of this cluster, with the runtime environment that this actor was started with."""
    context = ray.get_runtime_context()
    here = str(Path(__file__).parents[2])
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {
        "RAY_ADDRESS": context.gcs_address,
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(
            {"runtime_env": _plain(context.runtime_env), "metadata": {}}
        ),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _plain(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(dict(runtime_env)))
    return found


def start_driver(name: str, kind: str, content: str, resume: bool | str) -> None:
    """Start a driver on the head node of the connected cluster, and its command.

    Args:
        name: Of the run, unique among those in progress.
        kind: :data:`RUN_KIND` or :data:`SEARCH_KIND`.
        content: Of the YAML file.
        resume: Whether to go on with the newest of this name, or with which directory.

    Raises:
        ConfigError: one of this name is in progress, or the driver did not start.
    """
    arguments = [kind, *([f"--resume={'newest' if resume is True else resume}"] if resume else [])]
    actor: Any = ray.remote(num_cpus=0, max_restarts=0)(Driver)
    options = actor.options(
        name=name, namespace=NAMESPACE, lifetime="detached", resources=HEAD, max_concurrency=MOST_CALLS
    )
    deadline = time.monotonic() + GONE_S
    while True:
        try:
            driver = options.remote(name, arguments, content)
            ray.get(driver.content.remote())  # over Ray Client, a name that is taken is told only now
            break
        except (ValueError, ray.exceptions.RayError) as error:
            watch = Watch(name)
            if not watch.alive and time.monotonic() < deadline:
                time.sleep(0.2)  # the one before has just gone
                continue
            watch.poll()
            if watch.code is None or time.monotonic() > deadline:
                raise ConfigError(_why_not_started(name, watch, error)) from error
            watch.dismiss()  # it has ended, and was waiting to be asked about it
            time.sleep(0.2)
    driver.run.remote()


def _why_not_started(name: str, watch: Watch, error: BaseException) -> str:
    if watch.alive:
        return (
            f"{name}: a run of this name is in progress; allowed: ray_dynbs.attach({name!r}), or another name"
        )
    return f"{name}: its driver did not start: {' '.join(str(error).split())[:500]}"


class Watch:
    """A look at a driver, wherever it was started from.

    Args:
        name: Of the run.
    """

    def __init__(self, name: str) -> None:
        self._name, self._seen = name, 0
        self._driver = _driver(name)
        self.code: int | None = None

    @property
    def alive(self) -> bool:
        """Whether there is a driver to be asked."""
        return self._driver is not None

    def poll(self) -> list[str]:
        """What it has printed since the last look; waits a moment where that is nothing.

        Afterwards :attr:`code` is its exit code if it has ended.
        """
        if self._driver is None or self.code is not None:
            return []
        try:
            lines, self.code = ray.get(self._driver.news.remote(self._seen))
        except ray.exceptions.RayActorError:
            self._driver = None
            return []
        self._seen += len(lines)
        return list(lines)

    def content(self) -> str:
        """Of the file that it was started with; empty where it is gone."""
        return self._call("content") or ""

    def stop(self) -> None:
        """End it as by Ctrl-C."""
        self._call("stop")

    def dismiss(self) -> None:
        """Let it go: its end is known."""
        self._call("dismiss")

    def _call(self, method: str) -> Any:
        if self._driver is None:
            return None
        try:
            return ray.get(getattr(self._driver, method).remote())
        except ray.exceptions.RayActorError:
            self._driver = None
            return None


def _driver(name: str) -> Any | None:
    """The driver of a run in progress, or just ended; ``None`` where there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def find_record(name: str, out: str) -> tuple[str, str | None]:
    """What a run was started with, and its directory if it has ended and is no longer remembered.

    Args:
        name: Of the run.
        out: Where to look for its directory.

    Raises:
        ConfigError: there is none, neither in progress nor there.
    """
    content = Watch(name).content()
    if content:
        return content, None
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_newest)
    found = ray.get(task.options(resources=HEAD).remote(name, out))
    if isinstance(found, str):
        raise ConfigError(f"attach: {name!r} is not in progress, and {found.removeprefix('--resume: ')}")
    return found[1], found[0]


def _newest(name: str, out: str) -> tuple[str, str] | str:
    """Directory and configuration of the newest run of a name, or why there is none."""
    try:
        run = RunDirectory.newest(lasting(out), name)
    except ConfigError as error:
        return str(error)
    return run.absolute_uri, run.read_text(CONFIG)


def read_files(uri: str, names: Sequence[str]) -> dict[str, bytes]:
    """Files of a run directory on the cluster: name -> content, of those that exist."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_read)
    found: dict[str, bytes] = ray.get(task.options(resources=HEAD).remote(uri, list(names)))
    return found


def _read(uri: str, names: Sequence[str]) -> dict[str, bytes]:
    run = RunDirectory(uri)
    return {name: run.read_bytes(name) for name in names if run.exists(name)}
