"""``ray-dynbs tune`` as a user runs it: searches, resumes, failures, wrong input."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_dynbs.config import load_config
from ray_dynbs.storage.run_directory import RunDirectory
from ray_dynbs.storage.search_directory import read_results, read_trials
from tests.commands import call

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tune_configs"
THRESHOLDS = CONFIGS / "thresholds.yaml"
SHORT = ["--set", "set.epochs=3", "--set", "search.num_trials=4", "--set", "seeds=2"]


def values_of(record: RunDirectory) -> dict[str, float]:
    return {row["trial"]: row["value"] for row in read_trials(record)}


@pytest.mark.ray
@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_search_and_the_run_of_its_best(start: Any, tmp_path: Path) -> None:
    """Six trials of two seeds; the best one, trained as a run, has that seed's metric to the digit."""
    command = start("tune", str(THRESHOLDS), "--out", "runs", *SHORT)
    assert command.wait() == 0, command.text
    record = RunDirectory(str(tmp_path / "runs" / "thresholds"))
    rows = read_trials(record)
    assert len(rows) == 6
    assert {row["status"] for row in rows} <= {"finished", "stopped"}
    assert {len(row["values"]) for row in rows} == {2}
    for row in rows:
        assert row["value"] == pytest.approx(sum(row["values"]) / 2)
        folder = Path(record.absolute_uri) / "trials" / row["trial"]
        assert {"results.json", "seed-0", "seed-1"} <= {path.name for path in folder.iterdir()}
        assert len(RunDirectory(str(folder / "seed-1")).read_epochs()) == row["epochs"]
    finished = [row for row in rows if row["status"] == "finished"]
    best = max(finished, key=lambda row: row["value"])
    assert f"best: accuracy {best['value']:.4f} +- {best['spread']:.4f} in 3 epochs" in command.text
    assert command.text.count("\ntrial ") == 6
    assert command.survivors() == []
    assert "Best fixed batch" in record.read_text("search.html")
    again = start("train", str(tmp_path / "runs" / "thresholds" / "best.yaml"), "--out", "runs")
    assert again.wait() == 0, again.text
    assert f"best accuracy {best['values'][0]:.4f}" in again.text


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["thresholds", "noise_scale"])
def test_the_two_searches_that_have_to_be_quick(name: str, start: Any, tmp_path: Path) -> None:
    """Sixteen trials with ASHA and two seeds: minutes for both are allowed, under one each is usual."""
    began = time.monotonic()
    command = start("tune", str(CONFIGS / f"{name}.yaml"), "--out", "runs")
    assert command.wait(400) == 0, command.text
    assert time.monotonic() - began < 6 * 60
    rows = read_trials(RunDirectory(str(tmp_path / "runs" / name)))
    assert len(rows) == 16
    assert sum(row["status"] == "stopped" for row in rows) >= 4
    assert max(row["value"] for row in rows) > 0.96


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_shipped_population_runs(start: Any, tmp_path: Path) -> None:
    command = start("tune", str(CONFIGS / "population.yaml"), "--out", "runs", "--set", "set.epochs=4")
    assert command.wait() == 0, command.text
    record = RunDirectory(str(tmp_path / "runs" / "population"))
    assert not any(row["status"] == "failed" for row in read_trials(record))
    load_config(Path(record.absolute_uri) / "best.yaml")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_search_goes_on_without_repeating_a_trial(start: Any, tmp_path: Path) -> None:
    """kill -9 of the driver after five trials; the finished ones are not trained again."""
    longer = ["--set", "set.epochs=25", "--set", "scheduler.name=none", "--set", "search.num_trials=8"]
    command = start("tune", str(THRESHOLDS), "--out", "runs", *longer)
    command.wait_for("\ntrial 5")
    command.process.send_signal(signal.SIGKILL)
    command.process.wait(10)
    # Ray's own agents of a killed driver's cluster take their time.
    assert [each for each in command.survivors(60) if "Agent" not in each] == []
    record = RunDirectory(str(tmp_path / "runs" / "thresholds"))
    done = {}
    for folder in (Path(record.absolute_uri) / "trials").iterdir():
        results = read_results(record.absolute_uri, folder.name)
        if results and results[-1]["done"]:
            done[folder.name] = (folder / "results.json").stat().st_mtime_ns
    assert len(done) >= 5
    resumed = start("tune", str(THRESHOLDS), "--out", "runs", *longer, "--resume")
    assert resumed.wait() == 0, resumed.text
    rows = read_trials(record)
    assert len(rows) == 10
    assert {row["status"] for row in rows} == {"finished"}, [row["error"] for row in rows]
    assert done.keys() <= {row["trial"] for row in rows}
    for trial, changed in done.items():
        folder = Path(record.absolute_uri) / "trials" / trial
        assert (folder / "results.json").stat().st_mtime_ns == changed
        assert {row["incarnation"] for row in RunDirectory(str(folder / "seed-0")).read_epochs()} == {0}
    again = start("tune", str(THRESHOLDS), "--out", "runs", "--resume")
    assert again.wait() == 0, again.text
    assert values_of(record) == {row["trial"]: row["value"] for row in rows}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ctrl_c_leaves_a_search_that_goes_on(start: Any, tmp_path: Path) -> None:
    longer = ["--set", "set.epochs=400", "--set", "scheduler.name=none", "--set", "seeds=1"]
    command = start("tune", str(THRESHOLDS), "--out", "runs", *longer, "--set", "search.num_trials=1")
    trials = tmp_path / "runs" / "thresholds" / "trials"
    assert command.interrupt_once_there_is(trials, "*/results.json") == 130, command.text
    assert "interrupted; go on with: ray-dynbs tune " in command.text
    assert command.survivors() == []


TASK = """
from ray_dynbs.tasks import digits
from ray_dynbs.tasks.digits import build_model, datasets, metrics
def loss(model, batch):
    import os, torch.distributed as dist
    if model.training and CONDITION:
        raise ValueError("labels are from another planet")
    return digits.loss(model, batch)
"""
SPACE = {
    "base": {
        "task": "own_task",
        "epochs": 2,
        "metric": {"name": "accuracy", "mode": "max"},
        "optimizer": {"name": "sgd", "lr": 0.05},
        "batch": {"initial": 32, "max": 64},
        "guards": [],
        "policy": {"name": "fixed"},
    },
    "space": {"batch.initial": {"grid": [16, 32, 64]}},
    "scheduler": {"name": "none"},
    "search": {"algorithm": "grid"},
}


def own_search(tmp_path: Path, condition: str, **changes: Any) -> str:
    (tmp_path / "own_task.py").write_text(TASK.replace("CONDITION", condition))
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**SPACE, **changes}))
    return "own.yaml"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_where_all_trials_fail_the_first_cause_is_shown(start: Any, tmp_path: Path) -> None:
    command = start("tune", own_search(tmp_path, "True"))
    assert command.wait() == 1, command.text
    last = command.text.splitlines()[-1]
    assert last == "error: all 3 trials failed; the first: ValueError: labels are from another planet"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_failing_rank_of_two_ends_its_trial_and_no_other(start: Any, tmp_path: Path) -> None:
    """The other rank waits in a collective: nobody waits for it, and the next trial has ranks of its own.

    The trial that failed is in the table with its reason.
    """
    condition = "dist.get_rank() == 1 and len(batch['label']) == 16"
    base = {**SPACE["base"], "cluster": {"num_workers": 2}}  # type: ignore[dict-item]
    file = own_search(tmp_path, condition, base=base, resources={"cpu": 0.5})
    command = start("tune", file)
    assert command.wait(200) == 0, command.text
    rows = {
        row["param.batch.initial"]: row for row in read_trials(RunDirectory(str(tmp_path / "runs" / "own")))
    }
    assert [rows[size]["status"] for size in (16, 32, 64)] == ["finished", "failed", "finished"]
    assert rows[32]["error"] == "ValueError: labels are from another planet"
    assert "failed: ValueError: labels are from another planet; batch.initial=32" in command.text
    assert "done: 3 trials; 1 failed" in command.text
    assert "Traceback" not in command.text
    assert command.survivors() == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["space={batch.initail: {int: [8, 64]}}"], "space: the base has no key 'batch.initail'"),
        (["metric={name: f1, mode: max}"], "metric.name is 'f1'; the task reports accuracy, loss"),
        (
            ["space={optimizer.momentun: {uniform: [0.1, 0.9]}}"],
            "space: optimizer.momentun: optimizer (sgd): unknown argument 'momentun'",
        ),
        (["space={task_args.channel: {choice: [[4, 4]]}}"], "task_args.channel: unknown key"),
        (
            ["space={lr.rule: {grid: [nonsense]}}", "search={algorithm: grid}", "baselines=[]"],
            "lr.rule is 'nonsense'",
        ),
        (["seeds=0"], "seeds is 0; allowed: >= 1"),
        (["nonsense=1"], "nonsense: unknown key"),
    ],
)
def test_wrong_input_is_told_in_one_line_before_anything_starts(
    overrides: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [part for override in overrides for part in ("--set", override)]
    code, out, err = call(capsys, "tune", str(THRESHOLDS), "--out", str(tmp_path / "runs"), *options)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1
    assert words in lines[0]
    assert not (tmp_path / "runs").exists()


def test_a_runs_directory_is_no_searchs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.create(str(tmp_path), "run")
    run.write_text("config.yaml", "name: run\n")
    code, _, err = call(capsys, "tune", str(THRESHOLDS), "--resume", run.uri)
    assert (code, err.count("\n")) == (2, 1)
    assert "a run's directory, not a search's" in err
