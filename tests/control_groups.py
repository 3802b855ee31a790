"""Real control groups with a limit of memory, where this user may make one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Group:
    """A group of processes that may take so much memory together, in bytes."""

    def __init__(self, folder: Path, limit: str) -> None:
        self.folder, self._limit = folder, limit

    def add(self, pid: int) -> None:
        """Put a process into it; those it starts from then on are in it too."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def max_bytes(self) -> int:
        return int((self.folder / self._limit).read_text())

    @property
    def kills(self) -> int:
        """Processes that the kernel has killed in it for their memory."""
        name = "memory.oom_control" if self._limit == "memory.limit_in_bytes" else "memory.events"
        lines = [line.split() for line in (self.folder / name).read_text().splitlines()]
        return next((int(number) for word, number in lines if word == "oom_kill"), 0)


@contextlib.contextmanager
def control_group(max_bytes: int) -> Iterator[Group]:
    """A new group, which has to be empty again at the end; skips the test where none can be made."""
    name = f"ray-dynbs-test-{os.getpid()}-{time.monotonic_ns()}"
    v1 = (V1 / "memory.limit_in_bytes").exists()
    folder, limit = (V1 / name, "memory.limit_in_bytes") if v1 else (V2 / name, "memory.max")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs a control group with a limit of memory; {folder.parent}: {error.strerror}")
    try:
        try:
            (folder / limit).write_text(str(max_bytes))
        except OSError as error:
            pytest.skip(f"needs a control group with a limit of memory; {folder / limit}: {error.strerror}")
        yield Group(folder, limit)
    finally:
        _remove(folder)


def run_script(*parts: str, limited_by: Group | None = None) -> tuple[int, list[str], str]:
    """Exit code, lines and errors of a Python process, which begins once it is in the group."""
    script = "input()\n" + "".join(parts)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    ) as process:
        if limited_by is not None:
            limited_by.add(process.pid)
        out, err = process.communicate("begin\n", timeout=100)
    return process.returncode, out.splitlines(), err


def _remove(folder: Path, patience_s: float = 30.0) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
