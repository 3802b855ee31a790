"""Whole runs on a real cluster: rows received, trajectories, resume with other workers, replay."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.train
import torch

from ray_dynbs.cluster.data import prepare_data
from ray_dynbs.cluster.trainer import RunResult, run_training
from ray_dynbs.config import Config
from ray_dynbs.config.load import dump_yaml
from ray_dynbs.core.journal import decode_lines, replay
from ray_dynbs.core.order import epoch_order
from ray_dynbs.core.plan import rank_share
from ray_dynbs.report.history import read_history
from ray_dynbs.storage.run_directory import DECISIONS, MODEL, RunDirectory
from ray_dynbs.tasks.loading import load_task
from ray_dynbs.tasks.sources import resolve_sources

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480), pytest.mark.usefixtures("cluster")]

NUM_ROWS, EPOCHS, SIZES = 61, 6, [9, 33, 2, 61, 17]


def make_config(folder: Path, num_workers: Any, **task_args: Any) -> Config:
    return Config.model_validate(
        {
            "name": "problem",
            "task": "tests.problem_task",
            "task_args": {"num_rows": NUM_ROWS, "blocks": [20, 21, 50], "log": str(folder), **task_args},
            "seed": 5,
            "epochs": EPOCHS,
            "precision": "fp64",
            "metric": {"name": "mean_square", "mode": "min"},
            "optimizer": {"name": "sgd", "lr": 0.02, "momentum": 0.9},
            "scheduler": {"name": "CosineAnnealingLR", "T_max": "auto"},
            "batch": {"initial": 9, "min": 2, "max": 64},
            "policy": {"name": "tests.problem_task.alternate", "sizes": SIZES[1:] + SIZES[:1]},
            "guards": [],
            "lr": {"rule": "sqrt", "warmup_epochs": 2},
            "cluster": {"num_workers": num_workers},
            "memory": {"probe": "off"},  # the task writes down all rows that its loss is given
            "out": str(folder / "runs"),
        }
    )


def run(config: Config, directory: RunDirectory | None = None) -> tuple[RunResult, RunDirectory]:
    directory = directory or RunDirectory.create(config.out, config.name)
    sources = resolve_sources(config, load_task(config.task))
    data = prepare_data(sources, config.data.columns)
    return run_training(config, directory, data), directory


def history(directory: RunDirectory) -> list[dict[str, Any]]:
    """The epochs that count: of each, the last incarnation's."""
    return list({row["epoch"]: row for row in directory.read_epochs()}.values())


def weights(directory: RunDirectory) -> np.ndarray:
    state = torch.load(Path(directory.absolute_uri) / MODEL, weights_only=True)
    return torch.cat([tensor.reshape(-1) for tensor in state.values()]).numpy()


def received(folder: Path, rank: int) -> list[list[int]]:
    files = sorted(folder.glob(f"rank-{rank}-*.jsonl"))
    assert len(files) == 1
    return [json.loads(line) for line in files[0].read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunDirectory]:
    """An uninterrupted run on two workers."""
    folder = tmp_path_factory.mktemp("straight")
    result, directory = run(make_config(folder, 2))
    assert result.epochs == EPOCHS
    return folder, directory


def same_history(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["epoch"] for row in found] == [row["epoch"] for row in expected]
    for key in ("global_batch_size", "steps", "rows"):
        assert [row[key] for row in found] == [row[key] for row in expected], key
    for key in ("lr", "lr_scale", "train_loss", "val_loss", "val_metric", "grad_norm"):
        np.testing.assert_allclose(
            [r[key] for r in found], [r[key] for r in expected], rtol=1e-10, err_msg=key
        )


def see_what_was_received(folder: Path, directory: RunDirectory, epochs: int) -> None:
    """The rows that both workers received are the sizes of the journal, within epochs too."""
    by_step = {each.step: each.plan.global_batch_size for each in directory.read_decisions()}
    expected: list[list[list[int]]] = [[], []]
    step, size = 0, 9
    for epoch in range(epochs):
        order = epoch_order(NUM_ROWS, seed=5, epoch=epoch, shuffle="window").tolist()
        while order:
            size = by_step.get(step, size)
            rows, order, step = order[:size], order[size:], step + 1
            for rank in (0, 1):
                share = rank_share(len(rows), rank, 2)
                expected[rank] += [rows[share.start : share.stop]] if share else []
    assert [received(folder, rank) for rank in (0, 1)] == expected
    assert [row["rows"] for row in history(directory)] == [NUM_ROWS] * epochs


def test_every_worker_receives_exactly_the_decided_rows(straight: tuple[Path, RunDirectory]) -> None:
    """A change reaches the very next step of both workers: the rows they received prove it."""
    see_what_was_received(*straight, EPOCHS)
    assert [row["global_batch_size"] for row in history(straight[1])] == [SIZES[e % 5] for e in range(EPOCHS)]


def test_the_reported_lr_is_schedule_times_rule_times_warm_up(straight: tuple[Path, RunDirectory]) -> None:
    steps_per_epoch = -(-NUM_ROWS // 9)
    for row in history(straight[1]):
        epoch, size = row["epoch"], row["global_batch_size"]
        before_last = (row["steps"] - 1) * size
        seen = epoch + before_last / NUM_ROWS
        scale = 1 + ((size / 9) ** 0.5 - 1) * min(1, seen / 2)
        count = epoch * steps_per_epoch - (-before_last // 9)
        base = 0.01 * (1 + np.cos(np.pi * count / (EPOCHS * steps_per_epoch)))
        assert row["lr_scale"] == pytest.approx(scale, rel=1e-12)
        assert row["lr"] == pytest.approx(base * scale, rel=1e-9)


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_a_run(
    straight: tuple[Path, RunDirectory], tmp_path: Path
) -> None:
    _, directory = run(make_config(tmp_path, 3, blocks=[]))
    same_history(history(directory), history(straight[1]))
    np.testing.assert_allclose(weights(directory), weights(straight[1]), rtol=1e-10)


def test_an_interrupted_run_equals_an_uninterrupted_one(
    straight: tuple[Path, RunDirectory], tmp_path: Path
) -> None:
    """A worker fails in the fourth pass; resumed with three workers passes 4 to 6 are the same."""
    # Rank 0 of two holds 31 to 33 rows of each of the first three passes.
    config = make_config(tmp_path, 2, fail_after_rows=3 * 31 + 12)
    directory = RunDirectory.create(config.out, config.name)
    with pytest.raises(ray.train.TrainingFailedError, match="told to fail"):
        run(config, directory)
    assert len(history(directory)) == 3
    (tmp_path / "healed").touch()
    result, _ = run(make_config(tmp_path, 3), directory)
    assert result.epochs == EPOCHS
    same_history(history(directory), history(straight[1]))
    np.testing.assert_allclose(weights(directory), weights(straight[1]), rtol=1e-10)
    incarnations = [row["incarnation"] for row in directory.read_epochs()]
    assert incarnations == [0, 0, 0, 1, 1, 1]
    decisions = decode_lines(directory.read_text(DECISIONS))
    assert decisions[4].reasons == ("restart from version 3 with 3 ranks",)
    assert replay(decisions, config.make_manager) == []


@pytest.mark.slow
def test_a_run_goes_on_from_within_an_epoch(straight: tuple[Path, RunDirectory], tmp_path: Path) -> None:
    """Saved every ten rows; a worker fails in the third pass, of two rows a step: few are trained again."""
    config = make_config(tmp_path, 2, fail_after_rows=2 * 31 + 16)
    saving = config.checkpoint.model_copy(update={"every": {"samples": 10}})
    config = config.model_copy(update={"checkpoint": saving})
    directory = RunDirectory.create(config.out, config.name)
    with pytest.raises(ray.train.TrainingFailedError, match="told to fail"):
        run(config, directory)
    assert len(history(directory)) == 2
    (tmp_path / "healed").touch()
    result, _ = run(config, directory)
    assert result.epochs == EPOCHS
    lines = [json.loads(line) for file in tmp_path.glob("rank-*") for line in file.read_text().splitlines()]
    assert NUM_ROWS * EPOCHS < sum(len(rows) for rows in lines) <= NUM_ROWS * EPOCHS + 14
    same_history(history(directory), history(straight[1]))
    np.testing.assert_allclose(weights(directory), weights(straight[1]), rtol=1e-10)


@pytest.mark.slow
def test_evaluations_within_an_epoch_reach_decisions_and_the_record(tmp_path: Path) -> None:
    """Every 10 rows, decisions every 20, with and without a restart: the same evaluations and epochs."""

    def configured(folder: Path, **task_args: Any) -> Config:
        config = make_config(folder, 2, **task_args)
        every = {"samples": 10}
        sections = {
            "evaluate": config.evaluate.model_copy(update={"every": every}),
            "checkpoint": config.checkpoint.model_copy(update={"every": every}),
            "batch": config.batch.model_copy(update={"decide_every": {"samples": 20}}),
            "policy": {"name": "tests.problem_task.alternate", "sizes": [9, 4]},
            "epochs": 3,
        }
        return config.model_copy(update=sections)

    config = configured(tmp_path / "whole")
    _, whole = run(config)
    see_what_was_received(tmp_path / "whole", whole, 3)
    assert replay(whole.read_decisions(), config.make_manager) == []
    evaluations = whole.read_evaluations()
    places = [0, *(row["samples_seen"] for row in evaluations if row["epoch"] == 0)]
    assert all(10 <= later - earlier < 10 + 9 for earlier, later in pairwise(places))
    decisions = decode_lines(whole.read_text(DECISIONS))
    by_step = {row["step"]: row for row in evaluations}
    within = [d for d in decisions if d.signal and d.step in by_step]
    assert len(within) >= 2
    for decision in within:
        assert decision.signal is not None
        assert decision.signal.val_loss == by_step[decision.step]["val_loss"]
    config = configured(tmp_path / "broken", fail_after_rows=31 + 16)
    directory = RunDirectory.create(config.out, config.name)
    with pytest.raises(ray.train.TrainingFailedError, match="told to fail"):
        run(config, directory)
    (tmp_path / "broken" / "healed").touch()
    run(config, directory)
    same_history(history(directory), history(whole))
    found = {row["step"]: row for row in directory.read_evaluations()}
    assert found.keys() == by_step.keys()
    for step, row in found.items():
        assert row["val_loss"] == pytest.approx(by_step[step]["val_loss"], rel=1e-10)
    directory.write_text("config.yaml", dump_yaml(config))
    curve = read_history(directory).curve("val_loss")
    assert len(curve) == len(found) + 3
    assert curve == sorted(curve)


@pytest.mark.slow
def test_a_killed_worker_costs_an_epoch_and_nothing_else(
    straight: tuple[Path, RunDirectory], tmp_path: Path
) -> None:
    """kill -9 in the middle of the fourth pass: the group restarts from the third's checkpoint."""
    config = make_config(tmp_path, 2, kill_after_rows=3 * 30 + 12)
    result, directory = run(config)
    assert (tmp_path / "healed").exists()
    assert result.epochs == EPOCHS
    same_history(history(directory), history(straight[1]))
    np.testing.assert_allclose(weights(directory), weights(straight[1]), rtol=1e-10)
    assert {row["incarnation"] for row in directory.read_epochs()} == {0, 1}
    assert replay(decode_lines(directory.read_text(DECISIONS)), config.make_manager) == []


def test_the_journal_reproduces_every_decision(straight: tuple[Path, RunDirectory]) -> None:
    folder, directory = straight
    decisions = decode_lines(directory.read_text(DECISIONS))
    assert [(d.incarnation, d.version) for d in decisions] == [(0, v) for v in range(EPOCHS + 1)]
    assert replay(decisions, make_config(folder, 2).make_manager) == []
