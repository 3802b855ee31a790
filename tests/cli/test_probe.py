"""Probing as a user meets it: the command, and a run whose memory sets a limit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ray_dynbs.storage.run_directory import RunDirectory
from tests.commands import Command, call
from tests.control_groups import control_group

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


def found_to_fit(command: Command, allowed: int) -> int:
    """Rows, as the run's notes say."""
    found = re.search(rf"memory: (\d+) rows fit in one forward, of {allowed} allowed", command.text)
    assert found, command.text
    return int(found[1])


def epochs_of_digits(folder: Path) -> list[dict[str, Any]]:
    return RunDirectory.open(str(folder / "runs" / "digits")).read_epochs()


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
    assert all(words[2] == "GiB" and words[3].endswith("%") for words in sizes)
    assert "that may be used with headroom left free, on 2 x cpu" in command.text
    assert sum("largest tried" in line for line in lines) == 1
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
    """40 rows fit in one forward, which no reading tells: the batch stays, in pieces of a tenth less."""
    (tmp_path / "limited.py").write_text(LIMITED)
    sizes = ["--set", "batch.initial=192", "--set", "batch.max=256", "--set", "policy={name: fixed}"]
    command = start("train", str(DIGITS), "--set", "task=limited", "--set", "epochs=2", *sizes)
    assert command.wait() == 0, command.text
    micro = found_to_fit(command, 128)
    assert 32 <= micro <= 36
    rows = epochs_of_digits(tmp_path)
    assert {row["rows"] for row in rows} == {1437}
    assert {(row["global_batch_size"], row["micro_batch_size"], row["grad_accum_steps"]) for row in rows} == {
        (192, micro, 3)
    }


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_resume_on_fewer_workers_finds_out_anew_what_fits(start: Any, tmp_path: Path) -> None:
    """On two workers a share of 32 rows fits; alone, one worker would have all 64."""
    (tmp_path / "limited.py").write_text(LIMITED)
    sizes = ["--set", "batch.initial=64", "--set", "batch.max=64", "--set", "policy={name: fixed}"]
    base = ("train", str(DIGITS), "--set", "task=limited", *sizes)
    command = start(*base, "--set", "epochs=1")
    assert command.wait() == 0, command.text
    assert "rows fit in one forward" not in command.text
    command = start(*base, "--set", "epochs=2", "--set", "cluster.num_workers=1", "--resume")
    assert command.wait() == 0, command.text
    rows = epochs_of_digits(tmp_path)
    assert [row["micro_batch_size"] for row in rows] == [32, found_to_fit(command, 64)]
    assert [(row["rows"], row["global_batch_size"]) for row in rows] == [(1437, 64)] * 2


HUNGRY = """
import time

import torch
from ray_dynbs.tasks.digits import *

whole = loss
MEGABYTES = 16  # kept for the backward by each row


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = torch.ones(len(x), MEGABYTES * 2**18)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.kept[0, 0]


def loss(model, batch):
    if torch.is_grad_enabled():
        time.sleep(0.05)  # a fixed cost, as on a device: the largest micro-batch is the fastest one too
        handle = model.register_forward_hook(lambda _, __, scores: Kept.apply(scores))
        try:
            return whole(model, batch)
        finally:
            handle.remove()
    return whole(model, batch)
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_in_a_control_group_stays_under_its_cap(start: Any, tmp_path: Path) -> None:
    """Its batch would take 4 GiB, the group has 3 for everything, Ray included: it accumulates."""
    (tmp_path / "hungry.py").write_text(HUNGRY)
    sizes = ["--set", "batch.initial=256", "--set", "policy={name: fixed}", "--set", "cluster.num_workers=1"]
    arguments = ("train", str(DIGITS), "--set", "task=hungry", "--set", "epochs=2", *sizes)
    with control_group(3 * 2**30) as group:
        command = start(*arguments)
        group.add(command.process.pid)
        assert command.wait() == 0, command.text
        assert group.kills == 0
        assert command.survivors() == []
    rows, micro = epochs_of_digits(tmp_path), found_to_fit(command, 256)
    assert {(row["global_batch_size"], row["micro_batch_size"]) for row in rows} == {(256, micro)}
    assert 0.5 < max(row["memory_fraction"] for row in rows) < 1


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("memory.headroom=1", "memory.headroom is 1; allowed: < 1"),
        ("memory.headroom=-0.1", "memory.headroom is -0.1; allowed: >= 0"),
        ("memory.probe=sometimes", "memory.probe is 'sometimes'; allowed"),
        ("memory.activation_checkpointing=[]", "memory.activation_checkpointing"),
        (
            "memory.activation_checkpointing=auto",
            "no layers that repeat in a ModuleList or Sequential; allowed",
        ),
        (
            "memory.activation_checkpointing=[Block]",
            "names 'Block', which the model has no layer of; allowed",
        ),
    ],
)
def test_wrong_settings(setting: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "check", str(DIGITS), "--set", setting)
    assert code == 2
    assert complaint in err


def test_layers_that_compute_activations_again_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    setting = "memory.activation_checkpointing=[Conv2d]"
    code, out, _ = call(capsys, "check", str(DIGITS), "--set", setting)
    assert code == 0
    assert "activations computed again in the backward: 2 Conv2d" in out


def test_no_headroom_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "check", str(DIGITS), "--set", "memory.headroom=0")
    assert code == 0
    assert "warning: memory.headroom is 0" in err


def test_the_platform_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "check", "--platform")
    assert code == 0
    for words in ("python, torch", "cores for this process", "GiB in use", "precisions", "used by default"):
        assert words in out
