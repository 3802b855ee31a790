"""The loop's own contract: batches and steps in pairs, steps left out, several optimizers, mid-pass state."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ray_dynbs.core.cadence import Cadence
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators import PieceSums
from ray_dynbs.core.lr import Adjustment, ScheduleProgress
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.training.columns import ColumnStore
from ray_dynbs.training.feed import IndexedFeed
from ray_dynbs.training.loop import TrainingLoop
from ray_dynbs.training.lr import Schedule
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.reports import EpochReport, Interval
from ray_dynbs.training.stats import NOTHING, Totals
from ray_dynbs.training.step import OptimizerStep
from ray_dynbs.training.world import World
from tests.support import flat_weights, run_ranks, small_model, squared_error, table, training_loop

CPU = torch.device("cpu")
WHOLE = table(30)
BATCH = ColumnStore([WHOLE]).gather(np.arange(30))


def build(
    optimizers: Any = None, **step_options: Any
) -> tuple[nn.Module, TrainingLoop, torch.optim.lr_scheduler.LRScheduler]:
    """30 rows, 10 at a time, a schedule that halves the LR at every step."""
    world = World.current()
    model = small_model()
    found = optimizers(model) if optimizers else [torch.optim.SGD(model.parameters(), lr=0.05)]
    step = OptimizerStep(model, found, world, MixedPrecision("fp64", CPU), **step_options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(found[0], 0.5)
    feed = IndexedFeed(
        ColumnStore([WHOLE]),
        rank=world.rank,
        plan=BatchPlan.fit(10, world.size, 4),
        seed=0,
        shuffle="full",
        device=CPU,
    )
    loop = TrainingLoop(
        model=model,
        step=step,
        schedules=[Schedule(scheduler, ScheduleProgress(30, 10))],
        feed=feed,
        world=world,
    )
    return model, loop, scheduler


def nan_in_step(number: int, model: nn.Module, loop: TrainingLoop) -> Any:
    loss = squared_error(model)

    def spoil(batch: Any) -> Any:
        loss_sum, weight = loss(batch)
        bad = model.training and loop.progress.step + 1 == number
        return loss_sum * (float("nan") if bad else 1.0), weight

    return spoil


def test_a_step_that_is_not_finite_is_left_out_where_that_is_wanted() -> None:
    model, loop, scheduler = build(on_nonfinite="skip")
    report = loop.train_epoch(nan_in_step(2, model, loop))
    assert (report.steps, report.rows, loop.progress.skipped_steps) == (3, 30, 1)
    assert (report.totals.num_finite_steps, report.totals.first_bad_step) == (2, 2)
    assert scheduler.last_epoch == 2
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_skipping_ends_where_no_step_is_finite() -> None:
    model, loop, _ = build(on_nonfinite="skip")
    loss = squared_error(model)
    with pytest.raises(FloatingPointError, match=r"not finite in step 1 \(epoch 0\)"):
        loop.train_epoch(lambda batch: (loss(batch)[0] * float("inf"), loss(batch)[1]))


def test_else_the_run_stops_at_that_very_step() -> None:
    model, loop, _ = build()
    with pytest.raises(FloatingPointError, match=r"not finite in step 2 \(epoch 0\).*on_nonfinite: skip"):
        loop.train_epoch(nan_in_step(2, model, loop))
    assert loop.progress.step == 2


def test_optimizers_that_step_together_equal_one_with_two_groups() -> None:
    def two(model: Any) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(model[0].parameters(), lr=0.05),
            torch.optim.Adam(model[2].parameters(), lr=0.01),
        ]

    weights = []
    for scale in (1.0, 2.0):
        model, loop, _ = build(two)
        loop._lr_scale = scale
        loop.train_epoch(squared_error(model))
        assert [o.param_groups[0]["lr"] for o in loop._step.optimizers] == [0.05 / 8, 0.01]
        weights.append(flat_weights(model))
    assert not np.allclose(weights[0], weights[1])
    plain = small_model()
    optimizers = two(plain)
    for step in IndexedFeed(
        ColumnStore([WHOLE]), rank=0, plan=BatchPlan.fit(10, 1), seed=0, shuffle="full", device=CPU
    ).epoch(0):
        (batch,) = step.micro_batches()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_sum, weight = squared_error(plain)(batch)
        (loss_sum / weight).backward()
        for optimizer in optimizers:
            optimizer.step()
        optimizers[0].param_groups[0]["lr"] *= 0.5
    np.testing.assert_allclose(weights[0], flat_weights(plain), rtol=1e-10)


def test_a_third_value_of_the_loss_is_handed_back_for_each_micro_batch() -> None:
    model, loop, _ = build()
    loss = squared_error(model)
    for batch in loop.batches():
        result = loop.step(batch, lambda micro: (*loss(micro), micro["row"].tolist()))
        assert [len(rows) for rows in result.outputs] == [4, 4, 2]
        assert float(result.loss) == pytest.approx(float(result.loss_sum) / 10)


def test_a_batch_is_trained_on_exactly_once() -> None:
    model, loop, _ = build()
    loss = squared_error(model)
    batches = loop.batches()
    first = next(batches)
    with pytest.raises(RuntimeError, match="not trained on; allowed: step"):
        next(batches)
    model, loop, _ = build()
    loss, batches = squared_error(model), loop.batches()
    first = next(batches)
    loop.step(first, loss)
    with pytest.raises(RuntimeError, match="step\\(\\) once, for the batch"):
        loop.step(first, loss)


def interrupted(after_steps: int | None) -> tuple[np.ndarray, list[dict[str, Any]], float]:
    """Three passes; after some steps everything goes through JSON into a new loop."""
    model, loop, scheduler = build()
    reports, epoch, taken = [], 0, 0
    while epoch < 3:
        for batch in loop.batches():
            loop.step(batch, squared_error(model))
            taken += 1
            if taken == after_steps:
                break
        else:
            reports.append(loop.finish_epoch().to_json())
            epoch += 1
            continue
        state = json.loads(json.dumps(loop.state_dict()))
        weights, lr = model.state_dict(), scheduler.state_dict()
        count = loop._schedules[0].state_dict()
        model, loop, scheduler = build()
        model.load_state_dict(weights)
        scheduler.load_state_dict(lr)
        scheduler.optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
        loop.load_state_dict(state)
        loop._schedules[0].load_state_dict(
            {**count, "scheduler": None}, loop.progress.epoch, loop.progress.rows_in_epoch
        )
    for report in reports:
        assert EpochReport.from_json(json.loads(json.dumps(report))).rows == 30
        report.pop("epoch_time_s")
        for measured in (report, report["interval"]):
            measured.pop("memory_fraction")
        report["interval"].pop("step_time_s")
    return flat_weights(model), reports, scheduler.get_last_lr()[0]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("after_steps", [1, 3, 5])
def test_a_pass_interrupted_between_any_two_steps_goes_on_exactly(world_size: int, after_steps: int) -> None:
    """Also right after its last step (3): the report is then made after the restart."""
    straight = run_ranks(interrupted, world_size, None)
    for found, expected in zip(run_ranks(interrupted, world_size, after_steps), straight, strict=True):
        np.testing.assert_array_equal(found[0], expected[0])
        assert found[1:] == expected[1:]


@pytest.mark.parametrize(
    ("every", "steps"), [({"steps": 2}, [2, 1]), ({"samples": 11}, [2, 1]), ({"steps": 9}, [3])]
)
def test_decisions_within_a_pass_see_what_was_measured_since_the_last(
    every: dict[str, int], steps: list[int]
) -> None:
    model, loop, _ = build()
    loop._cadence = Cadence(**every)
    intervals: list[Interval] = []

    def decide() -> None:
        if loop.decision_due:
            intervals.append(loop.report_interval())

    report = loop.train_epoch(squared_error(model), decide)
    intervals.append(report.interval)
    assert [interval.steps for interval in intervals] == steps
    assert [interval.rows for interval in intervals] == [10 * count for count in steps]
    assert [interval.totals.num_steps for interval in intervals] == steps
    assert intervals[-1].epochs_seen == 1.0
    whole_model, whole, _ = build()
    expected = whole.train_epoch(squared_error(whole_model))
    assert (report.rows, report.steps) == (expected.rows, expected.steps)
    assert report.totals.loss == pytest.approx(expected.totals.loss, rel=1e-12)
    assert report.totals.grad_norm == pytest.approx(expected.totals.grad_norm, rel=1e-12)


def test_totals_add_up_also_their_noise_and_first_bad_step() -> None:
    pieces = PieceSums.of_step(1.0, 2.0)
    one = Totals(2, 1, 3.0, 4.0, 5.0, None, pieces)
    two = Totals(1, 1, 1.0, 1.0, 1.0, 7, None)
    assert one + two == Totals(3, 2, 4.0, 5.0, 6.0, 7, pieces)
    assert (two + one).pieces == pieces
    assert (one + one).pieces == pieces + pieces
    assert NOTHING + one == one
    assert Totals.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_optimizer_parameters_have_to_be_the_models() -> None:
    model, other = small_model(), small_model()
    with pytest.raises(ConfigError, match="parameters that the model has not"):
        OptimizerStep(
            model,
            [torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD(other.parameters(), lr=1.0)],
            World.current(),
            MixedPrecision("fp64", CPU),
        )


@pytest.mark.parametrize("scaled", [True, False])
def test_layers_may_be_thawed_and_frozen_on_the_way(scaled: bool) -> None:
    """Also where the optimizer learns of them only then; a plain loop is the measure."""

    def train(step_of: Any) -> np.ndarray:
        model = small_model()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        first = list((model if scaled else model[2]).parameters())
        optimizer = torch.optim.AdamW(first, lr=0.05)
        take = step_of(model, optimizer)
        for number in range(9):
            if number == 3:
                for parameter in model[0].parameters():
                    parameter.requires_grad_(True)
                if not scaled:
                    optimizer.add_param_group({"params": list(model[0].parameters())})
            if number == 6:
                model[2].bias.requires_grad_(False)
            take({name: tensor[number * 3 : number * 3 + 3] for name, tensor in BATCH.items()})
        return flat_weights(model)

    def ours(model: Any, optimizer: Any) -> Any:
        step = OptimizerStep(model, optimizer, World.current(), MixedPrecision("fp64", CPU))
        return lambda rows: step.run([rows], squared_error(model), rows=3, adjustment=Adjustment(1.0))

    def plain(model: Any, optimizer: Any) -> Any:
        def take(rows: Any) -> None:
            optimizer.zero_grad()
            loss_sum, weight = squared_error(model)(rows)
            (loss_sum / weight).backward()
            optimizer.step()

        return take

    np.testing.assert_allclose(train(ours), train(plain), rtol=1e-10)


def test_micro_batches_without_weight_teach_nothing_and_spoil_nothing() -> None:
    """A mean over no token times zero is NaN; a sum of nothing has no gradient at all."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = OptimizerStep(model, optimizer, World.current(), MixedPrecision("fp64", CPU))
    loss = squared_error(model)
    empty = [
        (loss(BATCH)[0] * float("nan"), 0),
        (torch.zeros(()), torch.tensor(0)),
    ]
    results = iter([empty[0], loss({name: rows[:4] for name, rows in BATCH.items()}), empty[1]])
    result = step.run([None] * 3, lambda _: next(results), rows=4, adjustment=Adjustment(1.0))
    assert torch.isfinite(result.loss)
    assert torch.isfinite(result.grad_norm)
    assert result.grad_norm > 0


def test_fp16_unscales_what_it_measures_and_skips_for_all_optimizers_alike() -> None:
    model = small_model(torch.float32)
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.05),
        torch.optim.SGD(model[2].parameters(), lr=0.05),
    ]
    rows = {name: tensor[:6].float() if name != "row" else tensor for name, tensor in BATCH.items()}
    norms = []
    for name, held in (("fp32", optimizers), ("fp16", optimizers), ("fp16", optimizers[:1])):
        precision = MixedPrecision(name, CPU)  # type: ignore[arg-type]
        precision.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=name == "fp16")
        step = OptimizerStep(model, held, World.current(), precision)
        norms.append(
            step.run([rows], squared_error(model), rows=6, adjustment=Adjustment(0.0)).grad_norm.item()
        )
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert norms[2] < norms[1]
    # An overflow in the second optimizer's gradients only.
    step = OptimizerStep(model, optimizers, World.current(), MixedPrecision("fp16", CPU))
    before = flat_weights(model)
    model[2].bias.register_hook(lambda grad: grad * float("inf"))
    result = step.run([rows], squared_error(model), rows=6, adjustment=Adjustment(1.0))
    assert not result.applied
    np.testing.assert_array_equal(flat_weights(model), before)
    assert step._precision.scaler.get_scale() == 65536.0 / 2


def test_a_schedule_goes_on_from_where_a_pass_was_left() -> None:
    model, loop, scheduler = build()
    for _ in range(3):
        for batch in loop.batches():
            loop.step(batch, squared_error(model))
            if batch.first_row == 10:
                break
        loop.finish_epoch()
    assert scheduler.last_epoch == 6


def test_a_scheduler_stepped_twice_is_noticed() -> None:
    model, loop, scheduler = build()
    batches = loop.batches()
    loop.step(next(batches), squared_error(model))
    scheduler.step()
    with pytest.raises(RuntimeError, match=r"stepped from elsewhere.*allowed: either scheduler\.step"):
        loop.step(next(batches), squared_error(model))


def test_schedulers_made_of_others_work() -> None:
    for kind in ("chained", "sequential"):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        parts = [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma) for gamma in (0.5, 0.5)]
        made: Any = torch.optim.lr_scheduler.ChainedScheduler(parts)
        if kind == "sequential":
            made = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
        schedule = Schedule(made, ScheduleProgress(30, 10))
        optimizer.step()
        for rows in (10, 20, 30):
            schedule.after_step(0, rows, applied=True)
        assert optimizer.param_groups[0]["lr"] == (0.5**6 if kind == "chained" else 0.5)


def test_only_one_iteration_at_a_time() -> None:
    model, loop, _ = build()
    outer = loop.batches()
    loop.step(next(outer), squared_error(model))
    inner = loop.batches()
    loop.step(next(inner), squared_error(model))
    with pytest.raises(RuntimeError, match="one iteration over batches"):
        next(outer)


def test_leaving_a_pass_early_counts_the_rows_really_used() -> None:
    model, loop = training_loop(table(30), BatchPlan.fit(10, 1))
    for batch in loop.batches():
        loop.step(batch, squared_error(model))
        if batch.first_row == 10:
            break
    report = loop.finish_epoch()
    assert (report.rows, report.steps, loop.progress.epoch, loop.progress.samples_seen) == (20, 2, 1, 20)
    assert sum(batch.rows for batch in loop.batches() if loop.step(batch, squared_error(model))) == 30
