"""The library form's own contract, without Ray: the real coordinator behind calls that are made at once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ray_dynbs.cluster.coordinator import Coordinator, DecisionRequest
from ray_dynbs.cluster.run import LoopInput, Run, in_run
from ray_dynbs.config.schema import LoopSettings
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.journal import replay
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.core.signal import Signal
from ray_dynbs.storage.run_directory import RunDirectory
from ray_dynbs.training.noise import Pieces
from ray_dynbs.training.stats import StepStats
from tests.support import flat_weights, run_ranks, small_model

ROWS = 80
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(200, 5, generator=GENERATOR, dtype=torch.float64)
Y = torch.sin(X).sum(1)


class Direct:
    """An actor handle whose calls are made at once."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        return type("Method", (), {"remote": staticmethod(method)})


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch)


def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's calls as plain ones."""
    counter = itertools.count()
    monkeypatch.setattr(ray, "get", lambda value, timeout=None: value)
    context = type("Context", (), {"get_worker_id": lambda self: f"group-{next(counter)}"})
    monkeypatch.setattr(ray, "get_runtime_context", context)
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)


def make_run(folder: Path, **settings: Any) -> tuple[Run, Coordinator]:
    settings = {"batch": {"initial": 8, "min": 1, "max": 64}, "policy": {"name": "fixed"}, **settings}
    checked = LoopSettings.model_validate(settings)
    directory = RunDirectory(str(folder))
    directory.make()
    coordinator = Coordinator(checked, directory)
    return Run(LoopInput(checked, None, Direct(coordinator))), coordinator


def loss(model: nn.Module) -> Any:
    def sum_of_squares(batch: Any) -> Any:
        error = model(batch[0]).squeeze(1) - batch[1]
        return (error**2).sum(), len(error)

    return sum_of_squares


def with_targets(model: nn.Module) -> Any:
    return lambda micro: (*loss(model)(micro), micro[1])


def rows_of(result: Any) -> list[int]:
    """The numbers of the rows a step was taken on."""
    return [int(torch.nonzero(value == Y)[0]) for targets in result.outputs for value in targets]


def prepared(
    folder: Path, scheduler: Any = None, rows: int = ROWS, **settings: Any
) -> tuple[Run, nn.Module, torch.optim.Optimizer, Any, Coordinator]:
    run, coordinator = make_run(folder, **settings)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    made = scheduler(optimizer) if scheduler else None
    run.prepare(model, optimizer, made, data=TensorDataset(X[:rows], Y[:rows]))
    return run, model, optimizer, made, coordinator


def train_pass(run: Run, model: nn.Module, steps: int | None = None) -> list[int]:
    """The rows of one pass, or of its first steps, as the numbers of their targets."""
    seen: list[int] = []
    for number, batch in enumerate(run.batches(), start=1):
        seen += rows_of(run.step(batch, with_targets(model)))
        if number == steps:
            break
    return seen


def recorded(coordinator: Coordinator) -> list[tuple[int, ...]]:
    rows = [record.row for record, _ in coordinator.progress(0)]
    keys = ("incarnation", "epoch", "steps", "rows", "global_batch_size", "world_size")
    return [tuple(row[key] for key in keys) for row in rows]


pytestmark = pytest.mark.usefixtures("without_ray")


def test_the_size_saved_is_the_size_first_drawn_in_a_new_process(tmp_path: Path) -> None:
    """Saved at 80, in the middle and at the end of a pass, before and after the decision that is due."""
    policy = {"name": "schedule", "stages": [[0, 80]]}
    options: dict[str, Any] = {"policy": policy, "guards": [], "batch": {"initial": 8, "max": 200}}
    run, model, *_ = prepared(tmp_path / "a", rows=200, **options)
    train_pass(run, model)
    states = [run.state_dict()]
    batches = run.batches()
    run.step(next(batches), loss(model))
    states.append(run.state_dict())
    for state in states:
        fresh, model, *_ = prepared(tmp_path / "b", rows=200, **options)
        fresh.load_state_dict(json.loads(json.dumps(state)))
        assert json.loads(json.dumps(fresh.state_dict())) == json.loads(json.dumps(state))
        assert fresh.epoch == 1
        assert next(iter(fresh.batches())).rows == 80


def test_rows_and_weights_after_a_restart_at_any_moment_are_those_without_one(tmp_path: Path) -> None:
    def whole(restart_after: int | None) -> tuple[list[list[int]], np.ndarray]:
        run, model, optimizer, scheduler, coordinator = prepared(tmp_path / str(restart_after), cosine)
        passes: list[list[int]] = []
        taken = 0
        while run.epoch < 3:
            seen = passes.pop() if run._restored and len(passes) > run.epoch else []
            for batch in run.batches():
                seen += rows_of(run.step(batch, with_targets(model)))
                taken += 1
                if taken == restart_after:
                    break
            passes.append(seen)
            if taken == restart_after:
                taken += 1000
                # As from within the loop body: the pass is not over.
                run._pass_left = False
                state = json.loads(json.dumps(run.state_dict()))
                weights, inner = model.state_dict(), scheduler.state_dict()
                again, _ = make_run(tmp_path / str(restart_after))
                again._given = LoopInput(again._given.settings, None, Direct(coordinator))
                model = small_model()
                model.load_state_dict(weights)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
                scheduler = cosine(optimizer)
                scheduler.load_state_dict(inner)
                optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
                again.prepare(model, optimizer, scheduler, data=TensorDataset(X[:ROWS], Y[:ROWS]))
                again.load_state_dict(state)
                run = again
        run.finish()
        assert [row[3] for row in recorded(coordinator)] == [ROWS] * 3
        return passes, flat_weights(model)

    straight = whole(None)
    for moment in (1, 7, 10, 14):
        found = whole(moment)
        assert found[0] == straight[0]
        np.testing.assert_array_equal(found[1], straight[1])


@pytest.mark.parametrize("every", [{"steps": 2}, {"samples": 30}])
def test_sizes_change_within_a_pass_and_a_restart_changes_nothing(
    tmp_path: Path, every: dict[str, int]
) -> None:
    """Every row once per pass; restarted in mid-pass, before and after a decision: the same steps."""
    policy = {"name": "tests.problem_task.alternate", "sizes": [3, 20, 11]}
    batch = {"initial": 8, "min": 1, "max": 64, "decide_every": every}

    def steps(restart_after: int | None) -> tuple[list[list[int]], Any]:
        folder = tmp_path / str(restart_after)
        run, model, *_, coordinator = prepared(folder, policy=policy, guards=[], batch=batch)
        taken: list[list[int]] = []
        while run.epoch < 2:
            for step in run.batches():
                taken.append(rows_of(run.step(step, with_targets(model))))
                if len(taken) == restart_after:
                    break
            if len(taken) == restart_after:
                run._pass_left = False  # as from within the loop body
                state, weights = json.loads(json.dumps(run.state_dict())), model.state_dict()
                run, model, *_ = prepared(folder, policy=policy, guards=[], batch=batch)
                run._given = LoopInput(run._given.settings, None, Direct(coordinator))
                model.load_state_dict(weights)
                run.load_state_dict(state)
                restart_after = None
        run.finish()
        journal = [d for d in coordinator._decisions.values() if d.signal is not None]
        sizes = {(d.version): d.plan.global_batch_size for d in journal}
        return taken, sizes

    straight, sizes = steps(None)
    assert len({len(step) for step in straight}) > 3
    rows = [row for step in straight for row in step]
    assert [sorted(rows[start : start + ROWS]) for start in (0, ROWS)] == [list(range(ROWS))] * 2
    assert len(sizes) >= 6
    for moment in (1, 2, 3, 4, 7):
        assert steps(moment) == (straight, sizes)


def test_each_pass_may_begin_with_the_base_size(tmp_path: Path) -> None:
    policy = {"name": "schedule", "stages": [[0, 20]]}
    batch = {"initial": 8, "min": 1, "max": 64, "decide_every": {"steps": 2}, "reset": "to_base"}
    run, model, *_ = prepared(tmp_path, policy=policy, guards=[], batch=batch)
    for _ in range(2):
        assert [batch.rows for batch in run.batches() if run.step(batch, loss(model))] == [
            8,
            8,
            20,
            20,
            20,
            4,
        ]


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)


def test_a_pass_left_early_is_on_record_and_a_peek_is_not_one(tmp_path: Path) -> None:
    run, model, _, scheduler, coordinator = prepared(tmp_path, cosine)
    next(iter(run.batches()))
    assert run.epoch == 0
    for _ in range(3):
        assert len(train_pass(run, model, steps=2)) == 16
    assert run.state_dict()["pass_left"]
    run.finish()
    assert recorded(coordinator) == [(0, epoch, 2, 16, 8, 1) for epoch in range(3)]
    assert scheduler.last_epoch == 6


def test_a_decision_still_due_is_recorded_with_the_sizes_it_was_trained_with(tmp_path: Path) -> None:
    policy = {"name": "schedule", "stages": [[0, 16]]}
    run, model, _, _, coordinator = prepared(tmp_path, policy=policy, guards=[])
    train_pass(run, model)
    state = run.state_dict()
    again, model, *_ = prepared(tmp_path, policy=policy, guards=[])
    again._given = LoopInput(again._given.settings, None, Direct(coordinator))
    again.load_state_dict(state)
    train_pass(again, model)
    again.finish()
    assert recorded(coordinator) == [(0, 0, 10, 80, 8, 1), (1, 1, 5, 80, 16, 1)]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"rows": 90}, "num_rows was 80, is 90 now"), ({"seed": 3}, "seed was 0, is 3 now")],
)
def test_other_data_are_refused_within_a_pass_and_said_between_passes(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    run, model, *_ = prepared(tmp_path / "a")
    train_pass(run, model)
    between = run.state_dict()
    batches = run.batches()
    run.step(next(batches), loss(model))
    within = run.state_dict()
    other, model, *_ = prepared(tmp_path / "b", **change)
    other.load_state_dict(within)
    with pytest.raises(ConfigError, match=f"{words}, and the checkpoint lies in the middle of a pass"):
        train_pass(other, model)
    other, model, _, _, coordinator = prepared(tmp_path / "c", **change)
    other.load_state_dict(between)
    train_pass(other, model)
    notes = [note for record, _ in coordinator.progress(0) for note in record.notes]
    assert any(words.split(",")[0].replace("was", "was") in note for note in notes), notes


def test_another_initial_size_keeps_the_schedules_plan(tmp_path: Path) -> None:
    run, model, _, scheduler, _ = prepared(tmp_path / "a", cosine)
    train_pass(run, model)
    state, inner = run.state_dict(), scheduler.state_dict()
    again, model, _, scheduler, coordinator = prepared(
        tmp_path / "b", cosine, batch={"initial": 16, "min": 1, "max": 64}
    )
    scheduler.load_state_dict(inner)
    again.load_state_dict(state)
    train_pass(again, model)
    train_pass(again, model)
    again.finish()
    assert scheduler.last_epoch == 30
    notes = [note for record, _ in coordinator.progress(0) for note in record.notes]
    assert "batch.initial is 16 now; the base LR stays that of a batch of 8" in notes


def test_reduce_on_plateau_sees_the_logged_loss(tmp_path: Path) -> None:
    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    run, model, optimizer, *_ = prepared(tmp_path, plateau)
    for value in (1.0, 2.0, 3.0):
        train_pass(run, model)
        run.log(loss=value)
    run.finish()
    assert optimizer.param_groups[0]["lr"] == 0.02 / 4


def test_one_cycle_ends_where_it_was_planned(tmp_path: Path) -> None:
    def one_cycle(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=31)

    policy = {"name": "schedule", "stages": [[0, 64], [150, 3]]}
    run, model, _, scheduler, _ = prepared(tmp_path, one_cycle, policy=policy, guards=[])
    for _ in range(3):
        train_pass(run, model)
    assert scheduler.last_epoch == 30


def test_misuse_is_told_what_to_do(tmp_path: Path) -> None:
    run, model, optimizer, *_ = prepared(tmp_path)
    with pytest.raises(RuntimeError, match=r"step\(\) before batches\(\); allowed"):
        run.step(None, loss(model))  # type: ignore[arg-type]
    with pytest.raises(
        RuntimeError, match=r"prepare\(\) a second time; allowed: once, with several optimizers"
    ):
        run.prepare(model, optimizer)
    with pytest.raises(RuntimeError, match="the run has not begun"):
        _ = run.plan
    train_pass(run, model)
    assert run.plan.global_batch_size == 8
    assert run.last_epoch is not None
    assert run.last_epoch.rows == ROWS
    with pytest.raises(RuntimeError, match="allowed: before batches"):
        run.load_state_dict({})
    bare, _ = make_run(tmp_path / "bare")
    with pytest.raises(RuntimeError, match=r"batches\(\) before prepare\(\)"):
        next(iter(bare.batches()))
    with pytest.raises(ConfigError, match="no training rows; allowed: datasets="):
        bare.prepare(model, optimizer)


def test_a_metric_that_is_not_logged_is_said(tmp_path: Path) -> None:
    run, model, _, _, coordinator = prepared(tmp_path, metric={"name": "accuracy", "mode": "max"})
    train_pass(run, model)
    run.log(acc=0.5)
    run.finish()
    ((record, _),) = coordinator.progress(0)
    assert record.notes == ("metric.name is 'accuracy', but run.log() was given acc",)


def test_another_number_of_schedulers_is_refused(tmp_path: Path) -> None:
    run, model, *_ = prepared(tmp_path / "a", cosine)
    train_pass(run, model)
    again, model, *_ = prepared(tmp_path / "b")
    again.load_state_dict(run.state_dict())
    with pytest.raises(ConfigError, match=r"had 1 schedulers, prepare\(\) was given 0"):
        train_pass(again, model)


def test_the_run_is_gone_after_the_loop_also_where_it_raises(tmp_path: Path) -> None:
    given = make_run(tmp_path)[0]._given
    assert in_run(given, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        in_run(given, lambda: 1 / 0)
    import ray_dynbs

    with pytest.raises(RuntimeError, match="no run in this process"):
        ray_dynbs.prepare(small_model(), [])


def test_ten_thousand_ranks_are_one_message(tmp_path: Path) -> None:
    """Their gradients' noise, merged, is decided upon from a request no larger than that of two ranks."""
    rng, sizes, decided = np.random.default_rng(0), {}, {}
    for ranks in (2, 10_000):
        rows, true = 2 * ranks, np.array([1.0, 0.0, 0.0])
        settings = LoopSettings.model_validate(
            {
                "batch": {"initial": rows, "min": 1, "max": 10**6},
                "policy": {"name": "noise_scale"},
                "guards": [],
            }
        )
        directory = RunDirectory(str(tmp_path / str(ranks)))
        directory.make()
        coordinator = Coordinator(settings, directory)
        state = coordinator.start("group", ranks, 10**7, None).state
        stats = StepStats(torch.device("cpu"))
        for _ in range(200):
            # Every rank holds two rows; the noise scale is 6,000 rows.
            gradients = true + rng.normal(size=(ranks, 3)) * np.sqrt(6_000 / 3 / 2)
            mean, squares = gradients.mean(axis=0), (gradients**2).sum(axis=1).mean()
            numbers = [torch.tensor(float(x)) for x in (mean @ mean, squares, ranks)]
            stats.add_pieces(Pieces(numbers[0], numbers[1], numbers[2], rows))
        signal = Signal.measured(
            num_steps=200, num_finite_steps=200, grad_norm=1.0, pieces=stats.take().pieces
        )
        request = DecisionRequest(state, signal)
        sizes[ranks] = len(json.dumps([request.state, request.signal.to_json()]))
        decided[ranks] = coordinator.decide(request).decision
    assert decided[10_000].plan.global_batch_size == 10_000
    assert "20000 -> 10000" in decided[10_000].reasons[0]
    assert sizes[10_000] < sizes[2] + 200


def shards_of(rows: list[int]) -> str:
    """What every rank is told when ranks hold different numbers of rows."""
    from ray_dynbs.cluster.adoption import Adoption
    from ray_dynbs.training.datasets import DatasetStore
    from ray_dynbs.training.world import World

    world, model = World.current(), small_model()
    mine = rows[world.rank]
    parts = Adoption.of(
        LoopSettings(),
        world,
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        schedulers=None,
        store=DatasetStore(TensorDataset(X[:mine], Y[:mine])),
    )
    with pytest.raises(ConfigError) as caught:
        parts.make_feed()
    return str(caught.value)


def test_a_part_of_the_data_on_each_rank_is_refused() -> None:
    for message in run_ranks(shards_of, 2, [41, 40]):
        assert message.startswith("the workers' data sets have 40 to 41 rows; allowed: the whole data set")


def narrow(model: nn.Module, most: int, sizes: list[int]) -> Any:
    """A loss that runs out of memory above so many rows."""

    def limited(batch: Any) -> Any:
        sizes.append(len(batch[1]))
        if len(batch[1]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return with_targets(model)(batch)

    return limited


def test_what_fits_is_found_with_the_first_step_and_kept(tmp_path: Path) -> None:
    """The loss is known only then: the batch in hand is cut anew, and no row is lost or used twice.

    Of 5 rows that no reading shows to be the limit 4 are used, of 3 two.
    """
    options: dict[str, Any] = {"batch": {"initial": 32, "min": 1, "max": 64}}
    run, model, *_, coordinator = prepared(tmp_path / "limited", **options)
    sizes: list[int] = []
    batches, seen = run.batches(), []
    for batch in batches:
        assert run.plan.micro_batch_size == (32 if not sizes else 4)
        result = run.step(batch, narrow(model, 5, sizes))
        assert max(len(targets) for targets in result.outputs) == 4
        seen += rows_of(result)
    assert sorted(seen) == list(range(ROWS))
    assert run.plan == BatchPlan(32, 4, 1)
    saved = json.loads(json.dumps(run.state_dict()))
    assert saved["manager"]["micro_ceiling"] == 4

    plain, twin, *_ = prepared(tmp_path / "plain", memory={"probe": "off"}, **options)
    train_pass(plain, twin)
    np.testing.assert_allclose(flat_weights(model), flat_weights(twin), rtol=1e-10)

    again, model, *_ = prepared(tmp_path / "limited", **options)
    again._given = LoopInput(again._given.settings, None, Direct(coordinator))
    again.load_state_dict(saved)
    sizes.clear()
    for batch in again.batches():
        again.step(batch, narrow(model, 3, sizes))  # another device, where fewer fit
    again.finish()
    assert max(sizes) == 4  # what did not fit before is not tried again
    assert again.plan.micro_batch_size == 2
    (decided,) = [d for d in coordinator._decisions.values() if d.version == 2]
    assert (decided.signal and decided.signal.micro_ceiling, decided.micro_ceiling) == (2, 2)
    journal = list(coordinator._decisions.values())
    assert [d.plan.micro_batch_size for d in journal] == [32, 4, 4, 2]
    settings = again._given.settings
    assert replay(journal, settings.make_manager) == []
    rows = [record.row for record, _ in coordinator.progress(0)]
    assert [(row["micro_batch_size"], row["grad_accum_steps"]) for row in rows] == [(4, 8), (2, 16)]
    notes = [note for record, _ in coordinator.progress(0) for note in record.notes]
    assert any("memory: 2 rows fit in one forward, of 4 allowed" in note for note in notes)


def limited_on_one_rank() -> tuple[Any, ...]:
    """Two ranks; one of them holds fewer rows."""
    import tempfile

    from ray_dynbs.training.world import World

    folder = tempfile.mkdtemp()
    run, model, *_ = prepared(Path(folder), batch={"initial": 32, "min": 1, "max": 64})
    most = 5 if World.current().rank else 9
    sizes: list[int] = []
    for batch in run.batches():
        run.step(batch, narrow(model, most, sizes))
    return run.plan, flat_weights(model).tolist()


@pytest.mark.usefixtures("without_ray")
def test_the_rank_with_the_least_memory_counts() -> None:
    first, second = run_ranks(limited_on_one_rank_without_ray, 2)
    assert first == second
    assert first[0] == BatchPlan(32, 4, 2)


def limited_on_one_rank_without_ray() -> tuple[Any, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patched(patch)
        return limited_on_one_rank()
