"""A run's driver on the cluster: an actor that outlives whoever started it, and ends itself.

The driver proper is the command, in a process of its own as everywhere else; the actor keeps what it says
for those who follow, now or later, and is found by the run's name.
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
from ray.util import list_named_actors

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
GRACE_S = 10.0
"""What an actor has for its own end, before its process ends it."""
SEPARATOR = "#"
"""Between the run's name and a number in an actor's name."""
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
            [sys.executable, "-m", "ray_dynbs", arguments[0], str(file), *arguments[1:], "--events"],
            stdin=subprocess.PIPE,  # which closes when this process ends, however it does
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_environment(),
            start_new_session=True,
        )
        self._ended = threading.Event()
        threading.Thread(target=self._take_down, name="ray-dynbs-driver", daemon=True).start()

    def run(self) -> None:
        """Wait for the command's end, then for those who want to know of it, and end."""
        self._ended.wait()
        self._dismissed.wait(LINGER_S)
        ray.actor.exit_actor()

    def _take_down(self) -> None:
        """What the command prints; ends the process where nobody has called :meth:`run`, which would."""
        output: Any = self._process.stdout
        for line in output:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._code = STOPPED if self._process.wait() < 0 and self._stopped else self._process.returncode
            self._changed.notify_all()
        self._folder.cleanup()
        self._ended.set()
        self._dismissed.wait(LINGER_S)
        time.sleep(GRACE_S)
        os._exit(0)

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
    for earlier in _drivers(name):
        watch = Watch(earlier)
        watch.poll()
        if watch.alive and watch.code is None:
            raise ConfigError(
                f"{name}: a run of this name is in progress; allowed: ray_dynbs.attach({name!r}), or another "
                "name"
            )
        watch.dismiss()  # it has ended, and was waiting to be asked about it
    arguments = [kind, *([f"--resume={'newest' if resume is True else resume}"] if resume else [])]
    actor: Any = ray.remote(num_cpus=0, max_restarts=0)(Driver)
    options = actor.options(
        name=f"{name}{SEPARATOR}{time.time_ns()}",  # Ray keeps the name of one that has ended for a while
        namespace=NAMESPACE,
        lifetime="detached",
        resources=HEAD,
        max_concurrency=MOST_CALLS,
    )
    try:
        driver = options.remote(name, arguments, content)
        ray.get(driver.content.remote())
    except ray.exceptions.RayError as error:
        why = " ".join(str(error).split())[:500]
        raise ConfigError(f"{name}: its driver did not start: {why}") from error
    driver.run.remote()


def find_driver(name: str) -> Any | None:
    """The newest driver of a run, in progress or ended and not yet gone; ``None`` without any."""
    return next(iter(reversed(_drivers(name))), None)


def _drivers(name: str) -> list[Any]:
    """All drivers of a run that Ray knows, the newest last."""
    known = [
        each["name"] for each in list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE
    ]
    own = [each for each in known if each.rpartition(SEPARATOR)[0] == name]
    found = []
    for each in sorted(own, key=lambda full: int(full.rpartition(SEPARATOR)[2])):
        with contextlib.suppress(ValueError):  # it has just gone
            found.append(ray.get_actor(each, namespace=NAMESPACE))
    return found


class Watch:
    """A look at a driver, wherever it was started from.

    Args:
        driver: The actor; ``None`` where there is none any more.

    ``code`` is its exit code once it has ended, ``was_lost`` says that it is gone without one.
    """

    def __init__(self, driver: Any | None) -> None:
        self._driver, self._seen = driver, 0
        self.code: int | None = None
        self.was_lost = False

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
            self._driver, self.was_lost = None, True
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


def find_record(name: str, out: str) -> tuple[str, str | None]:
    """What a run was started with, and its directory if it has ended and is no longer remembered.

    Args:
        name: Of the run.
        out: Where to look for its directory.

    Raises:
        ConfigError: there is none, neither in progress nor there.
    """
    content = Watch(find_driver(name)).content()
    if content:
        return content, None
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_newest)
    found = ray.get(task.options(resources=HEAD).remote(name, out))
    if isinstance(found, str):
        raise ConfigError(
            f"attach: {name!r} is not in progress, and {found.removeprefix('--resume: ').partition(';')[0]}"
        )
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
