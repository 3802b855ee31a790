"""The command as a user runs it: the main job, failures, Ctrl-C and resume, other people's data."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from ray_dynbs.config import load_config
from ray_dynbs.core.journal import decode_lines, replay
from ray_dynbs.storage.run_directory import RunDirectory
from ray_dynbs.storage.tables import EPOCH_SCHEMA

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "jobs" / "configs" / "digits.yaml"


def test_the_main_job(start: Any, tmp_path: Path) -> None:
    """Digits on two workers: accuracy, sizes decided by the policy, every row of every epoch."""
    command = start("train", str(DIGITS), "--out", str(tmp_path / "runs"))
    assert command.wait() == 0, command.text
    run = RunDirectory.open(str(tmp_path / "runs" / "digits"))
    epochs = run.read_epochs()
    assert [row["epoch"] for row in epochs] == list(range(12))
    assert {row["rows"] for row in epochs} == {1437}
    assert {row["world_size"] for row in epochs} == {2}
    assert max(row["val_metric"] for row in epochs) >= 0.95
    assert len({row["global_batch_size"] for row in epochs}) >= 3
    decisions = decode_lines(run.read_text("decisions.jsonl"))
    for before, row in zip(decisions, epochs, strict=False):
        assert row["global_batch_size"] == before.plan.global_batch_size
        assert row["steps"] == -(-1437 // row["global_batch_size"])
    resolved = load_config(Path(run.absolute_uri) / "config.yaml")
    assert replay(decisions, resolved.make_manager) == []
    assert pq.read_schema(Path(run.absolute_uri) / "epochs.parquet").equals(EPOCH_SCHEMA)
    assert {"model.pt", "checkpoints", "config.yaml"} <= {p.name for p in Path(run.absolute_uri).iterdir()}
    lines = [line.split() for line in command.text.splitlines() if line.strip()[:1].isdigit()]
    assert [int(line[0]) for line in lines] == list(range(1, 13))
    assert [int(line[1]) for line in lines] == [row["global_batch_size"] for row in epochs]
    assert command.survivors() == []


@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_resumes_and_no_process(start: Any, tmp_path: Path) -> None:
    """The whole process group gets the signal, as from a terminal."""
    out = ["--out", str(tmp_path / "runs"), "--set", "task_args={channels: [4, 4]}"]
    command = start("train", str(DIGITS), *out, "--set", "epochs=500")
    command.wait_for("samples/s")
    command.wait_for("grow", times=1)
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.wait(120) == 130, command.text
    assert command.survivors() == []
    run = RunDirectory.open(str(tmp_path / "runs" / "digits"))
    done = len(run.read_epochs())
    assert 2 < done < 500
    resumed = start("train", str(DIGITS), *out, "--set", f"epochs={done + 2}", "--resume")
    assert resumed.wait() == 0, resumed.text
    assert f"resume: epochs was 500, is now {done + 2}" in resumed.text
    history = {row["epoch"]: row for row in run.read_epochs()}
    assert sorted(history) == list(range(done + 2))
    assert {row["rows"] for row in history.values()} == {1437}
    again = start("train", str(DIGITS), *out, "--set", f"epochs={done + 2}", "--resume", run.uri)
    assert again.wait() == 0
    assert "nothing left to do" in again.text
    assert not (tmp_path / "runs" / "digits-2").exists()


@pytest.mark.slow
def test_a_run_interrupted_within_its_first_epoch_goes_on_from_its_checkpoint(
    start: Any, tmp_path: Path
) -> None:
    (tmp_path / "slow_task.py").write_text(
        "import time\n"
        "from ray_dynbs.tasks import digits\n"
        "from ray_dynbs.tasks.digits import build_model, datasets, metrics\n"
        "def loss(model, batch):\n"
        "    time.sleep(0.05 * model.training)\n"
        "    return digits.loss(model, batch)\n"
    )
    arguments = ["train", str(DIGITS), "--out", "runs", "--set", "task=slow_task", "--set", "epochs=1"]
    arguments += ["--set", "checkpoint.every={steps: 5}", "--set", "cluster.num_workers=1"]
    command = start(*arguments)
    checkpoints = tmp_path / "runs" / "digits" / "checkpoints"
    assert command.interrupt_once_there_is(checkpoints, "epoch-00000-step-*") == 130, command.text
    assert "interrupted; go on with: ray-dynbs train " in command.text
    resumed = start(*arguments, "--resume")
    assert resumed.wait() == 0, resumed.text
    run = RunDirectory.open(str(tmp_path / "runs" / "digits"))
    assert [(row["incarnation"], row["rows"]) for row in run.read_epochs()] == [(1, 1437)]
    starts = [d for d in decode_lines(run.read_text("decisions.jsonl")) if d.signal is None]
    assert [d.incarnation for d in starts] == [0, 1]
    kept = [path.name for path in checkpoints.iterdir() if path.name.startswith("epoch-")]
    assert len(kept) <= 2 + 2  # num_to_keep, and what an interrupt left behind


@pytest.mark.slow
def test_sigterm_is_taken_as_ctrl_c(start: Any, tmp_path: Path) -> None:
    command = start("train", str(DIGITS), "--out", str(tmp_path / "runs"), "--set", "epochs=500")
    command.wait_for("hold")
    command.process.terminate()
    assert command.wait(120) == 130, command.text
    assert "interrupted; go on with: ray-dynbs train " in command.text
    assert "SIGTERM received" not in command.text
    assert command.survivors() == []


def write_blobs(folder: Path, num_rows: int) -> None:
    """Two separable classes in two files of a folder, read back as somebody's own data."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, num_rows)
    points = rng.normal(size=(num_rows, 2)) + 3 * labels[:, None]
    whole = pa.table({"a": points[:, 0], "b": points[:, 1], "y": labels})
    folder.mkdir()
    pq.write_table(whole.slice(0, num_rows // 3), folder / "part-0.parquet")
    pq.write_table(whole.slice(num_rows // 3), folder / "part-1.parquet")


@pytest.mark.slow
def test_any_parquet_folder_and_a_task_of_ones_own(start: Any, tmp_path: Path) -> None:
    """Three ragged workers on other people's columns; the task lies beside the configuration."""
    write_blobs(tmp_path / "train", 307)
    write_blobs(tmp_path / "validation", 101)
    (tmp_path / "own_task.py").write_text("from ray_dynbs.tasks.tabular import build_model, loss, metrics\n")
    config = {
        "task": "own_task",
        "task_args": {"num_classes": 2, "hidden": [8]},
        "epochs": 5,
        "metric": {"name": "accuracy", "mode": "max"},
        "optimizer": {"name": "adamw", "lr": 0.05},
        "data": {
            "train": "train",
            "validation": "validation",
            "features": ["a", "b"],
            "label": "y",
        },
        "policy": {"name": "fixed"},
        "batch": {"initial": 32},
        "cluster": {"num_workers": 3},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    command = start("train", "own.yaml")
    assert command.wait() == 0, command.text
    epochs = RunDirectory.open(str(tmp_path / "runs" / "own")).read_epochs()
    assert [row["rows"] for row in epochs] == [307] * 5
    assert [row["steps"] for row in epochs] == [10] * 5
    assert epochs[-1]["val_metric"] > 0.9


def test_more_workers_than_the_cluster_can_place(start: Any, tmp_path: Path) -> None:
    command = start("train", str(DIGITS), "--out", str(tmp_path / "runs"), "--set", "cluster.num_workers=999")
    assert command.wait() == 2
    assert command.text.startswith(
        "error: cluster.num_workers is 999: they need 124.875 CPU, the cluster has "
    )
    assert command.text.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    assert command.survivors() == []


@pytest.mark.slow
def test_a_failing_task_names_its_cause_first(start: Any, tmp_path: Path) -> None:
    (tmp_path / "bad_task.py").write_text(
        "from ray_dynbs.tasks.digits import build_model, datasets, metrics\n"
        "from ray_dynbs.tasks import digits\n"
        "def loss(model, batch):\n"
        "    if model.training:\n"
        "        raise ValueError('labels are from another planet')\n"
        "    return digits.loss(model, batch)\n"
    )
    command = start("train", str(DIGITS), "--out", "runs", "--set", "task=bad_task")
    assert command.wait() == 1
    lines = command.text.splitlines()
    position = next(i for i, line in enumerate(lines) if line.startswith("error"))
    assert lines[position].endswith("ValueError: labels are from another planet")
    assert "bad_task.py" in "\n".join(lines[position:])
    assert not (tmp_path / "runs" / "digits").exists()
    assert command.survivors() == []
