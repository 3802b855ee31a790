"""Probing as a user meets it: the command, and a run whose memory sets a limit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ray_dynbs.storage.run_directory import RunDirectory
from tests.commands import call

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "jobs" / "configs" / "digits.yaml"
LIMITED = """
import torch
from ray_dynbs.tasks.digits import *

whole = loss


def loss(model, batch):
    rows = len(batch["label"])
    if torch.is_grad_enabled() and rows > 40:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return whole(model, batch)
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_prints_and_draws_what_it_found(start: Any, tmp_path: Path) -> None:
    guards = ["--set", "guards=[{name: class_coverage}]", "--set", "batch.initial=64"]
    command = start("probe", str(DIGITS), *guards, "--plot", "probe.png")
    assert command.wait() == 0, command.text
    lines = command.text.splitlines()
    sizes = [line.split() for line in lines if line.split()[0].isdigit()]
    assert [int(words[0]) for words in sizes] == sorted(int(words[0]) for words in sizes)
    assert len(sizes) >= 4
    assert all(words[1].endswith("%") for words in sizes)
    assert sum("largest that fits" in line for line in lines) == 1
    assert sum("knee" in line for line in lines) == 1
    assert "class coverage: at least " in command.text
    assert "recommended: batch.initial " in command.text
    assert "rows (+-" in command.text or "lost in noise" in command.text
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")
    assert command.survivors() == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_where_memory_sets_a_limit_a_run_accumulates(start: Any, tmp_path: Path) -> None:
    """40 rows fit in one forward, which no reading tells: the batch stays, in pieces of at most 40."""
    (tmp_path / "limited.py").write_text(LIMITED)
    sizes = ["--set", "batch.initial=192", "--set", "batch.max=256", "--set", "policy={name: fixed}"]
    command = start("train", str(DIGITS), "--set", "task=limited", "--set", "epochs=2", *sizes)
    assert command.wait() == 0, command.text
    found = re.search(r"memory: (\d+) rows fit in one forward, of 128 allowed", command.text)
    assert found, command.text
    micro = int(found[1])
    assert 36 <= micro <= 40
    rows = RunDirectory.open(str(tmp_path / "runs" / "digits")).read_epochs()
    assert {row["rows"] for row in rows} == {1437}
    assert {(row["global_batch_size"], row["micro_batch_size"], row["grad_accum_steps"]) for row in rows} == {
        (192, micro, 3)
    }
    refused = start("train", str(DIGITS), "--set", "task=limited", "--set", "memory.probe=off", *sizes)
    assert refused.wait() == 1
    assert "CUDA out of memory" in refused.text


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("memory.headroom=1", "memory.headroom is 1; allowed: < 1"),
        ("memory.headroom=-0.1", "memory.headroom is -0.1; allowed: >= 0"),
        ("memory.probe=sometimes", "memory.probe is 'sometimes'; allowed"),
    ],
)
def test_wrong_settings(setting: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "check", str(DIGITS), "--set", setting)
    assert code == 2
    assert complaint in err


def test_no_headroom_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "check", str(DIGITS), "--set", "memory.headroom=0")
    assert code == 0
    assert "warning: memory.headroom is 0" in err


def test_the_platform_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "check", "--platform")
    assert code == 0
    for words in ("python, torch", "cores for this process", "GiB in use", "precisions", "used by default"):
        assert words in out
