"""``ray-dynbs`` run as a user runs it: a process group of its own, whose every process is accounted for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ray_dynbs.cli.main import main

ROOT = Path(__file__).parents[1]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command, called in this process."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    captured = capsys.readouterr()
    return int(exit_info.value.code or 0), captured.out, captured.err


class Command:
    """A ``ray-dynbs`` process in its own process group, as a shell would start it."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.output = folder / "output.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ray_dynbs", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
                env=environment | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            )
        self.seen: dict[int, psutil.Process] = {}

    def watch(self) -> None:
        """Remember every process that this one has started so far."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self.seen.update({child.pid: child for child in family})

    def wait(self, timeout_s: float = 300) -> int:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"still running after {timeout_s} s:\n{self.text}")
            self.watch()
            time.sleep(0.2)
        return self.process.returncode

    def wait_for(self, words: str, times: int = 1, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while self.text.count(words) < times:
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None, self.text
            self.watch()
            time.sleep(0.1)

    def interrupt_once_there_is(self, folder: Path, pattern: str, timeout_s: float = 120) -> int:
        """Ctrl-C, to the whole process group, once a file is there; the exit code."""
        deadline = time.monotonic() + timeout_s
        while not list(folder.glob(pattern)):
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.2)
        self.watch()
        os.killpg(self.process.pid, signal.SIGINT)
        return self.wait(timeout_s)

    def survivors(self, patience_s: float = 15) -> list[str]:
        """What is left of its processes."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=patience_s)
        return [f"{p.pid} {p.name()}" for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    @property
    def text(self) -> str:
        return self.output.read_text()

    def end(self) -> None:
        for process in [*self.seen.values(), psutil.Process(self.process.pid)]:
            if process.is_running():
                process.kill()
        self.process.wait(timeout=10)
