"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.commands import Command

# No time limit per example: the machines are shared. Under CI hypothesis' own profile holds, which has
# none either and draws the same examples every time.
settings.register_profile("here", deadline=None)
if not os.environ.get("CI"):
    settings.load_profile("here")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts ``ray-dynbs`` with arguments, in the test's folder; what still runs afterwards is ended."""
    commands = []

    def run(*arguments: str) -> Command:
        commands.append(Command(*arguments, folder=tmp_path))
        return commands[-1]

    yield run
    for command in commands:
        if command.process.poll() is None:
            command.end()
