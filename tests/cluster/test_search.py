"""Trials: each seed exactly as a run of its own; populations; groups of ranks, and what they leave behind."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from ray import tune
from ray.util.placement_group import placement_group_table

from ray_dynbs.cluster.data import PreparedData, prepare_data
from ray_dynbs.cluster.search.driver import _share_of_memory, check_room, plan_search, run_search
from ray_dynbs.cluster.search.ensemble import Ensemble
from ray_dynbs.cluster.search.group import OneRank, TrialInput
from ray_dynbs.cluster.search.record import TrialRecord, first_cause, rank
from ray_dynbs.cluster.search.searcher import points_to_try
from ray_dynbs.cluster.search.trial import still_there
from ray_dynbs.config.search import Candidates, Search
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.journal import decode_lines, replay
from ray_dynbs.storage.run_directory import DECISIONS, RunDirectory
from ray_dynbs.training.columns import ColumnStore
from ray_dynbs.training.probe import Probe
from ray_dynbs.training.world import World
from tests import problem_task
from tests.support import run_ranks, table

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "task": "tests.problem_task",
    "task_args": {"num_rows": 61},
    "seed": 5,
    "epochs": 4,
    "precision": "fp64",
    "metric": {"name": "mean_square", "mode": "min"},
    "optimizer": {"name": "sgd", "lr": 0.02, "momentum": 0.9},
    "batch": {"initial": 9, "min": 2, "max": 61},
    "policy": {"name": "threshold", "relative": True, "grad_norm_low": 0.99, "grad_norm_high": 1.5},
    "guards": [],
    "lr": {"rule": "sqrt"},
}
STORES = {"train": ColumnStore([table(61)]), "validation": ColumnStore([table(23, seed=9)])}


def make(space: dict[str, Any], base: dict[str, Any] | None = None, **more: Any) -> Candidates:
    search = {"base": {**BASE, **(base or {})}, "space": space, **more}
    return Candidates(Search.model_validate(search), ROOT)


def ensemble(
    folder: Path, seeds: int, restored: Path | None = None, first_seed: int = 5, probe: str = "off"
) -> Ensemble:
    base = {
        "seed": first_seed,
        "memory": {"probe": probe},
    }  # which of two sizes is faster is not the question
    config = make({"optimizer.lr": {"choice": [0.02]}}, base).base
    return Ensemble(config, seeds, STORES, World.current(CPU), folder=str(folder), restored=restored)


def epochs_of(folder: Path, seed: int) -> list[dict[str, Any]]:
    rows = RunDirectory(f"{folder}/seed-{seed}").read_epochs()
    return [{k: v for k, v in row.items() if not k.endswith("_s") and k != "memory_fraction"} for row in rows]


def test_every_seed_is_trained_as_if_it_were_alone(tmp_path: Path) -> None:
    """Three in turn in one process, and each by itself: the same epochs, bit for bit; and other ones each."""
    together = ensemble(tmp_path / "all", 3)
    for _ in range(4):
        found = together.train_epoch()
    for seed in (5, 6, 7):
        alone = ensemble(tmp_path / "one", 1, first_seed=seed)
        for _ in range(4):
            alone.train_epoch()
        assert epochs_of(tmp_path / "all", seed) == epochs_of(tmp_path / "one", seed)
    best = [min(r["val_metric"] for r in epochs_of(tmp_path / "all", s)) for s in (5, 6, 7)]
    assert list(found.values) == best
    assert len(set(best)) == 3
    assert (found.value, found.spread) == pytest.approx((np.mean(best), np.std(best, ddof=1)))
    assert (found.epoch, found.samples) == (4, 4 * 61)
    decisions = decode_lines(RunDirectory(str(tmp_path / "all" / "seed-6")).read_text(DECISIONS))
    config = make({"optimizer.lr": {"choice": [0.02]}}).base
    assert replay(decisions, config.make_manager) == []
    assert len({d.plan.global_batch_size for d in decisions}) > 1


def test_a_trial_that_was_interrupted_equals_one_that_was_not(tmp_path: Path) -> None:
    whole, half = ensemble(tmp_path / "whole", 2), ensemble(tmp_path / "half", 2)
    for _ in range(4):
        expected = whole.train_epoch()
    for _ in range(2):
        half.train_epoch()
    (tmp_path / "saved").mkdir()
    half.write_checkpoints(tmp_path / "saved")
    half.train_epoch()  # lost: after the checkpoint
    resumed = ensemble(tmp_path / "half", 2, restored=tmp_path / "saved")
    assert resumed.epoch == 2
    for _ in range(2):
        found = resumed.train_epoch()
    assert (found.values, found.samples, found.steps) == (expected.values, expected.samples, expected.steps)
    assert found.time_s > 0
    for seed in (5, 6):
        later = {row["epoch"]: row for row in epochs_of(tmp_path / "half", seed)}
        for row in epochs_of(tmp_path / "whole", seed):
            assert {**later[row["epoch"]], "incarnation": 0} == row


def test_trials_that_would_find_the_same_are_probed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else they try; a trial of another optimizer needs other memory."""
    probed: list[int] = []
    find = Probe.find

    def counted(self: Probe, *arguments: Any, **sizes: Any) -> Any:
        probed.append(sizes["most"])
        return find(self, *arguments, **sizes)

    monkeypatch.setattr(Probe, "find", counted)
    candidates = make({"optimizer.lr": {"choice": [0.02]}})
    rank = OneRank(TrialInput({}, num_seeds=2, cpus=1, gpus=0))
    monkeypatch.setattr(rank, "_rows", lambda config: STORES)
    for number, changes in enumerate(
        [{"optimizer.lr": 0.02}, {"optimizer.lr": 0.5, "lr.rule": "none"}, {"optimizer.name": "adam"}]
    ):
        rank.begin(candidates.at(changes), str(tmp_path / str(number)), None)
        rank.train_epoch()
    assert probed == [61, 61]


@pytest.mark.parametrize(
    ("search", "num_points", "trials_at_once"),
    [
        ({}, None, 8),
        ({}, 3, 3),
        ({"concurrency": 2}, 30, 2),
        ({"concurrency": 20}, 30, 8),
        ({"resources": {"cpu": 4}}, 30, 2),
        ({"resources": {"cpu": 16}}, 30, 1),
    ],
)
def test_trials_at_once_share_a_nodes_memory(
    search: dict[str, Any], num_points: int | None, trials_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": cpus}} for cpus in (8.0, 2.0)]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {"Alive": False, "Resources": {"CPU": 99.0}}])
    candidates = make({"optimizer.lr": {"choice": [0.02]}}, **search)
    assert _share_of_memory(candidates, num_points) == 1 / trials_at_once


def test_a_trial_keeps_to_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = problem_task.loss

    def limited(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        if model.training and len(batch["y"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return whole(model, batch)

    monkeypatch.setattr(problem_task, "loss", limited)
    ensemble(tmp_path, 1, probe="auto").train_epoch()
    (row,) = epochs_of(tmp_path, 5)
    assert (row["global_batch_size"], row["micro_batch_size"], row["grad_accum_steps"]) == (9, 3, 3)


def test_a_checkpoint_that_was_replaced_meanwhile_is_the_newest_beside_it(tmp_path: Path) -> None:
    """A driver killed with kill -9 may have recorded one that a later epoch's has replaced since."""
    for number, listed in ((9, "{}"), (24, '{"seed-5/state.pt": 3}'), (25, '{"seed-5/state.pt": 4}')):
        folder = tmp_path / f"checkpoint_{number:06d}" / "seed-5"
        folder.mkdir(parents=True)
        (folder / "state.pt").write_text("abc")
        (folder.parent / "whole.json").write_text(listed)
    (tmp_path / "checkpoint_000026").mkdir()  # the kill came while it was copied, as with 25
    (tmp_path / "params.json").touch()
    for recorded, expected in (("checkpoint_000009", 9), ("checkpoint_000023", 24)):
        found = still_there(tune.Checkpoint(str(tmp_path / recorded)))
        assert found.path == str(tmp_path / f"checkpoint_{expected:06d}")
    nowhere = tune.Checkpoint(str(tmp_path / "other" / "checkpoint_000001"))
    assert still_there(nowhere) is nowhere  # which Tune will say


def two_ranks(folder: str) -> list[float]:
    found = ensemble(Path(folder), 2)
    return [list(found.train_epoch().values) for _ in range(3)][-1]


def test_two_ranks_come_to_what_one_comes_to(tmp_path: Path) -> None:
    both = run_ranks(two_ranks, 2, str(tmp_path / "two"))
    alone = ensemble(tmp_path / "one", 2)
    for _ in range(3):
        expected = alone.train_epoch().values
    assert both[0] == both[1]
    assert both[0] == pytest.approx(list(expected), rel=1e-10)


def record(trial: str, value: float, status: str = "finished", cost: float | None = None) -> TrialRecord:
    result = {"value": value, "cost": cost, "epoch": 1, "time_s": 1.0, "done": status == "finished"}
    return TrialRecord(trial, {}, status, (result,))


def test_complete_trials_are_ranked_before_those_stopped_early() -> None:
    lower = make({"optimizer.lr": {"choice": [0.02]}})
    rows = [record("a", 0.3), record("b", 0.1, "stopped"), record("c", 0.2), record("d", float("nan"))]
    assert [r.trial for r in rank([*rows, TrialRecord("e", {}, "failed")], lower)] == ["c", "a", "b"]
    assert [r.trial for r in rank([record("b", 0.1, "stopped")], lower)] == ["b"]
    alike = [record(trial, 0.1) for trial in "zxy"]
    assert [r.trial for r in rank(alike, lower)] == ["x", "y", "z"]
    target = make({"optimizer.lr": {"choice": [0.02]}}, target={"value": 0.2, "cost": "steps"})
    rows = [record("a", 0.1, cost=90.0), record("b", 0.19, cost=20.0), record("c", 0.5, "stopped", 1e18)]
    assert [r.trial for r in rank(rows, target)] == ["b", "a", "c"]


def test_the_first_cause_is_one_line() -> None:
    assert first_cause(None) == ""
    assert first_cause("Traceback\n  File x\nValueError: why\n") == "ValueError: why"
    assert first_cause(ValueError("plain")) == "plain"


# -- on a real cluster -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(cluster: None) -> PreparedData:
    return prepare_data({"train": table(61), "validation": table(23, seed=9)}, None)


def searched(
    candidates: Candidates, data: PreparedData, folder: Path, *, resume: bool = False
) -> tuple[list[TrialRecord], list[TrialRecord]]:
    """The records of a search, and those that were told while it ran."""
    told: list[TrialRecord] = []
    run = RunDirectory(str(folder))
    run.make()
    plan = None if resume else plan_search(candidates, data)
    return run_search(candidates, data, run, told.append, plan), told


def left_over() -> tuple[list[str], list[Any], float]:
    """Trial processes, placement groups and CPUs in use, once there are none or a while has passed."""
    for _ in range(60):
        family = psutil.Process().children(recursive=True)
        names = [" ".join(each.cmdline()) for each in family if each.status() != psutil.STATUS_ZOMBIE]
        actors = [name for name in names if "Trial" in name or "ray::Rank" in name]
        groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
        used = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)
        if not actors and not groups and not used:
            break
        time.sleep(0.5)
    return actors, groups, used


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_population_takes_over_weights_and_obeys_its_new_thresholds(
    data: PreparedData, tmp_path: Path
) -> None:
    """The manager's memory comes with the checkpoint, the thresholds are the mutated ones from then on."""
    candidates = make(
        {
            "policy.grad_norm_low": {"uniform": [0.5, 1.0]},
            "optimizer.lr": {"loguniform": [1e-6, 0.05]},
        },
        {"epochs": 8},
        search={"algorithm": "pbt", "num_trials": 4, "interval_epochs": 2},
        scheduler={"name": "none"},
    )
    records, _ = searched(candidates, data, tmp_path)
    assert [r.status for r in records] == ["finished"] * 4
    taken_over = 0
    for each in records:
        points = [result["point"] for result in each.results]
        assert all(0.5 <= point["policy.grad_norm_low"] <= 1.0 for point in points)
        assert all(1e-6 <= point["optimizer.lr"] <= 0.05 for point in points)
        run = RunDirectory(str(tmp_path / "trials" / each.trial / "seed-5"))
        decisions = decode_lines(run.read_text(DECISIONS))
        for before, after in itertools.pairwise(points):
            if before == after:
                continue
            taken_over += 1
        # Every decision said which limits it went by: those of the point in force in its epoch. A state taken
        # over may be of a later or an earlier epoch.
        by_epoch = {d.epoch: d for d in decisions if d.signal is not None}
        in_force = {result["epoch"] - 1: result["point"] for result in each.results}
        for epoch, point in in_force.items():
            said = by_epoch[epoch].reasons[0]
            if "of its median" in said and "within" in said:
                assert f"within [{point['policy.grad_norm_low']:g}, 1.5]" in said
        starts = [d for d in decisions if d.signal is None and d.version]
        assert all(d.reasons[0].startswith(f"restart from version {d.version} with 1 ranks") for d in starts)
        assert not any("dropped" in d.reasons[0] for d in starts)
    assert taken_over >= 2


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twelve_trials_of_two_workers_leave_nothing_behind(data: PreparedData, tmp_path: Path) -> None:
    candidates = make(
        {"optimizer.lr": {"loguniform": [1e-4, 0.05]}, "policy.grad_norm_low": {"uniform": [0.5, 1.0]}},
        {"epochs": 9, "cluster": {"num_workers": 2}},
        search={"num_trials": 12},
        scheduler={"name": "asha", "grace_epochs": 1, "reduction_factor": 3},
        resources={"cpu": 0.5},
    )
    check_room(candidates)
    records, told = searched(candidates, data, tmp_path)
    assert len(records) == len(told) == 12
    assert {r.status for r in records} == {"finished", "stopped"}
    assert sum(r.status == "stopped" for r in records) >= 6
    for each in records:
        rows = RunDirectory(str(tmp_path / "trials" / each.trial / "seed-5")).read_epochs()
        assert {row["world_size"] for row in rows} == {2}
        assert {row["rows"] for row in rows} == {61}
    assert left_over() == ([], [], 0.0)


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_candidates_the_simulator_thinks_little_of_are_not_trained(
    data: PreparedData, tmp_path: Path
) -> None:
    """Small batches cost steps, and the simulated step has a fixed cost: tiny ones are thrown out."""
    candidates = make(
        {"batch.initial": {"logint": [2, 61]}},
        {"policy": {"name": "fixed"}, "epochs": 2},
        search={"num_trials": 5},
        scheduler={"name": "none"},
        prefilter="simulate",
    )
    records, _ = searched(candidates, data, tmp_path)
    trained = [r.point["batch.initial"] for r in records if r.status == "finished"]
    out = [r.point["batch.initial"] for r in records if r.status == "filtered"]
    assert len(trained) == 5
    assert out
    assert max(out) < min(trained)


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_optuna_where_hardly_anything_fits_says_so_trial_by_trial(data: PreparedData, tmp_path: Path) -> None:
    """The batch's bounds exclude the whole space: each trial is in the table with its complaint."""
    candidates = make({"batch.initial": {"int": [300, 400]}}, search={"algorithm": "optuna", "num_trials": 2})
    records, told = searched(candidates, data, tmp_path)
    assert [r.status for r in records] == ["failed"] * 2
    assert all("initial is 3" in r.error and "allowed: 2 to 61" in r.error for r in (*records, *told))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_budget_cuts_trials_and_baselines_are_trained_to_their_end(
    data: PreparedData, tmp_path: Path
) -> None:
    space = {"optimizer.lr": {"loguniform": [1e-4, 0.05]}}
    cut = make(
        space, {"epochs": 100_000}, search={"num_trials": 1}, scheduler={"name": "none"}, time_budget_s=15
    )
    (only,), _ = searched(cut, data, tmp_path / "cut")
    assert only.status == "cut"
    assert 0 < only.last["epoch"] < 100_000
    baseline = {"optimizer.lr": 1e-9}
    halved = make(
        space,
        {"epochs": 9},
        search={"num_trials": 6},
        baselines=[baseline],
        scheduler={"name": "asha", "grace_epochs": 1},
    )
    records, _ = searched(halved, data, tmp_path / "halved")
    assert next(r for r in records if r.point == baseline).status == "finished"
    assert "stopped" in {r.status for r in records}


def test_grid_points_that_make_no_configuration_are_in_the_table(tmp_path: Path) -> None:
    candidates = make({"lr.rule": {"grid": ["none", "adam_sde", "nonsense"]}}, search={"algorithm": "grid"})
    unusable: list[Any] = []
    assert points_to_try(candidates, lambda _: True, unusable) == [{"lr.rule": "none"}]
    assert [point["lr.rule"] for point, _ in unusable] == ["adam_sde", "nonsense"]
    assert "changes betas, and SGD has none" in unusable[0][1]
    candidates = make({"lr.rule": {"choice": ["none", "adam_sde"]}}, search={"num_trials": 9})
    points = points_to_try(candidates, lambda _: True, [])
    assert points == [{"lr.rule": "none"}] * 9
    candidates = make({"lr.rule": {"choice": ["none", "sqrt"]}}, search={"num_trials": 9})
    with pytest.raises(ConfigError, match="draws in a row is worth training; the last: prefilter: the sim"):
        points_to_try(candidates, lambda _: False, [])
    with pytest.raises(ConfigError, match=r"no point makes a configuration; the first: point: lr\.rule is"):
        points_to_try(make({"lr.rule": {"grid": ["x"]}}, search={"algorithm": "grid"}), lambda _: True, [])


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_target_ends_a_trial_and_its_cost_counts(data: PreparedData, tmp_path: Path) -> None:
    candidates = make(
        {"optimizer.lr": {"grid": [1e-9, 0.02]}},
        {"epochs": 6},
        search={"algorithm": "grid"},
        scheduler={"name": "none"},
        target={"value": 0.5, "cost": "samples"},
    )
    records, _ = searched(candidates, data, tmp_path)
    best, other = rank(records, candidates)
    assert best.point == {"optimizer.lr": 0.02}
    assert best.last["cost"] == best.last["samples"] == 61 * best.last["epoch"] < 61 * 6
    assert other.last["cost"] == 1e18
    results = json.loads((tmp_path / "trials" / best.trial / "results.json").read_text())
    assert results[-1]["current"] <= 0.5 < results[-2]["current"]
    assert left_over() == ([], [], 0.0)


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_room_for_a_trial_is_looked_at_first(data: PreparedData) -> None:
    space = {"optimizer.lr": {"choice": [0.02]}}
    with pytest.raises(ConfigError, match=r"a trial needs 0\.5 GPU, the cluster has 0"):
        check_room(make(space, resources={"gpu": 0.5}))
    with pytest.raises(ConfigError, match=r"for each of 50 workers: a trial needs 100 CPU"):
        check_room(make(space, {"cluster": {"num_workers": 50}}, resources={"cpu": 2.0}))
