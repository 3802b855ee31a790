"""Gradient noise as the step measures it, against per-row gradients computed apart from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators import PieceSums, from_pieces
from ray_dynbs.core.plan import BatchPlan, rank_share
from ray_dynbs.training.columns import ColumnStore
from ray_dynbs.training.feed import IndexedFeed
from ray_dynbs.training.loop import TrainingLoop
from ray_dynbs.training.measuring import BUDGET, Measuring
from ray_dynbs.training.noise import Pieces
from ray_dynbs.training.plain import plain_model
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.stats import StepStats
from ray_dynbs.training.step import OptimizerStep
from ray_dynbs.training.world import World
from tests.support import run_ranks, small_model, squared_error, table, training_loop

WHOLE = table(47)
CPU = torch.device("cpu")


def weighted(model: nn.Module) -> Any:
    """Weights that are not rows: some rows count for nothing, some for three."""
    plain = squared_error(model)

    def loss(batch: Any) -> Any:
        weights = (batch["row"] % 4).to(batch["y"].dtype)
        each = [
            plain({name: rows[i : i + 1] for name, rows in batch.items()})[0] for i in range(len(weights))
        ]
        return (torch.stack(each) * weights).sum(), weights.sum()

    return loss


LOSSES = {"rows": squared_error, "weights": weighted}


def measured(dtype: torch.dtype, plan: BatchPlan, kind: str, options: dict[str, Any]) -> list[Any]:
    """One pass with a frozen model (LR 0), so that every step's gradients can be computed apart from it."""
    world = World.current()
    model = small_model(dtype)
    wrapped: nn.Module = model
    if world.size > 1:
        wrapped = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    preconditioned = options.pop("preconditioned", False)
    if preconditioned:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0, eps=1e-3, betas=(0.9, 0.99))
    precision = MixedPrecision(options.pop("precision", "fp64"), CPU)
    clip = options.pop("clip", None)
    step = OptimizerStep(
        plain_model(wrapped),
        optimizer,
        world,
        precision,
        clip_grad_norm=clip,
        preconditioned=preconditioned,
    )
    feed = IndexedFeed(
        ColumnStore([WHOLE]), rank=world.rank, plan=plan, seed=0, shuffle="none", device=world.device
    )
    loop = TrainingLoop(
        model=model, step=step, schedules=[], feed=feed, world=world, measure_every=1, **options
    )
    found = []
    for batch in loop.batches():
        loop.step(batch, LOSSES[kind](wrapped))
        found.append(loop._stats._pieces.tolist())
    return [np.diff(np.array([[0.0] * 6, *found]), axis=0).tolist(), loop.finish_epoch().totals.pieces]


def offline(
    plan: BatchPlan, kind: str, cuts: Any, *, preconditioned: bool = False
) -> list[tuple[float, float]]:
    """|G|^2 and tr(Sigma) of every step from its pieces' gradients, in float64; Adam's metric as asked."""
    model, found = small_model(), []
    second, steps = np.zeros(sum(p.numel() for p in model.parameters())), 0
    for start in range(0, WHOLE.num_rows, plan.global_batch_size):
        rows = min(plan.global_batch_size, WHOLE.num_rows - start)
        gradients, weights = [], []
        for piece in cuts(rows):
            batch = ColumnStore([WHOLE]).gather(np.arange(start + piece.start, start + piece.stop))
            model.zero_grad()
            loss_sum, weight = LOSSES[kind](model)(batch)
            if float(weight) == 0:
                continue
            (loss_sum / weight).backward()
            gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy())
            weights.append(float(weight))
        if len(gradients) > 1:
            shares, stack = np.array(weights) / sum(weights), np.stack(gradients)
            whole = shares @ stack
            if preconditioned and steps:
                stack = stack / (np.sqrt(second / (1 - 0.99**steps)) + 1e-3)
            second, steps = 0.99 * second + 0.01 * whole**2, steps + 1
            if preconditioned and steps == 1:
                continue  # Adam knows no moments yet
            mean = shares @ stack
            squares = float(shares @ (stack**2).sum(axis=1))
            found.append(from_pieces(float(mean @ mean), squares, len(gradients), rows))
    return found


def compare(steps: list[list[float]], expected: list[tuple[float, float]], rel: float) -> None:
    values = [step[1:3] for step in steps if step[0]]
    assert len(values) == len(expected) > 3
    np.testing.assert_allclose(values, expected, rtol=rel, atol=rel * float(np.abs(expected).max()))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    ("precision", "dtype", "rel"), [("fp64", torch.float64, 1e-10), ("fp32", torch.float32, 1e-5)]
)
def test_ranks_are_the_pieces_of_a_ddp_step(precision: str, dtype: Any, rel: float, kind: str) -> None:
    """Two gloo ranks, ragged shares, accumulation, clipping: as computed from the rows apart from it."""
    plan = BatchPlan.fit(9, 2, 2)
    options = {"precision": precision, "clip": 0.1}
    expected = offline(plan, kind, lambda rows: [rank_share(rows, rank, 2) for rank in (0, 1)])
    for steps, totals in run_ranks(measured, 2, dtype, plan, kind, options):
        compare(steps, expected, rel)
        assert isinstance(totals, PieceSums)
        assert totals.steps == len(expected)
        assert totals.grad_sq == pytest.approx(sum(grad for grad, _ in expected), rel=1e-4)


@pytest.mark.parametrize("kind", LOSSES)
def test_micro_batches_are_the_pieces_of_a_single_rank(kind: str) -> None:
    plan = BatchPlan.fit(9, 1, 4)
    steps, _ = measured(torch.float64, plan, kind, {})
    compare(steps, offline(plan, kind, lambda rows: list(plan.micro_batches(rows, 0))), 1e-10)


def halves(rows: int) -> list[range]:
    middle = -(-rows // 2)
    return [range(middle), range(middle, rows)]


def test_a_lone_micro_batch_is_cut_in_two_only_where_that_is_wanted() -> None:
    plan = BatchPlan.fit(9, 1)
    steps, _ = measured(torch.float64, plan, "rows", {"lone": "split"})
    compare(steps, offline(plan, "rows", halves), 1e-10)
    steps, totals = measured(torch.float64, plan, "rows", {})
    assert totals is None
    assert not np.any(steps)


def test_fp16_is_unscaled() -> None:
    plan = BatchPlan.fit(9, 1, 4)
    found = {}
    for precision in ("fp32", "fp16"):
        found[precision] = measured(torch.float32, plan, "rows", {"precision": precision})[1]
    assert found["fp16"].variance / found["fp16"].steps == pytest.approx(
        found["fp32"].variance / found["fp32"].steps, rel=0.05
    )


def test_adams_metric_on_ranks_and_on_micro_batches() -> None:
    """Every gradient over sqrt(v_hat) + eps, of the moments before the step; measured from the second on."""
    plan = BatchPlan.fit(9, 2, 2)
    options: dict[str, Any] = {"precision": "fp64", "preconditioned": True}
    expected = offline(
        plan, "rows", lambda rows: [rank_share(rows, rank, 2) for rank in (0, 1)], preconditioned=True
    )
    for steps, totals in run_ranks(measured, 2, torch.float64, plan, "rows", options):
        compare(steps, expected, 1e-10)
        assert totals.preconditioned
    plan = BatchPlan.fit(9, 1, 4)
    expected = offline(plan, "rows", lambda rows: list(plan.micro_batches(rows, 0)), preconditioned=True)
    steps, _ = measured(torch.float64, plan, "rows", {"preconditioned": True})
    compare(steps, expected, 1e-10)
    with pytest.raises(ConfigError, match="SGD keeps no second moments; allowed with adam"):
        OptimizerStep(
            model := small_model(),
            torch.optim.SGD(model.parameters()),
            World.current(),
            MixedPrecision("fp64", CPU),
            preconditioned=True,
        )


def test_successive_steps_stand_in_for_pieces_and_say_so() -> None:
    """47 rows in steps of 9: every step but the first against the one before it, the last of 2 rows too."""
    plan = BatchPlan.fit(9, 1)
    steps, totals = measured(torch.float64, plan, "rows", {"lone": "successive"})
    assert totals.biased
    gradients, sizes, model = [], [], small_model()
    for start in range(0, 47, 9):
        batch = ColumnStore([WHOLE]).gather(np.arange(start, min(start + 9, 47)))
        model.zero_grad()
        loss_sum, weight = squared_error(model)(batch)
        (loss_sum / weight).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy())
        sizes.append(weight)
    expected = []
    for i in range(1, len(sizes)):
        a, b, size_a, size_b = gradients[i - 1], gradients[i], sizes[i - 1], sizes[i]
        variance = float((a - b) @ (a - b)) / (1 / size_a + 1 / size_b)
        if size_a == size_b:
            assert from_pieces(
                float((a + b) @ (a + b)) / 4, float(a @ a + b @ b) / 2, 2, 18
            ) == pytest.approx((float(a @ b), variance))
        mean = (size_a * a + size_b * b) / (size_a + size_b)
        expected.append((float(mean @ mean) - variance / (size_a + size_b), variance))
    assert not any(steps[0])
    compare(steps, expected, 1e-10)


def test_successive_steps_follow_the_measuring_cadence_and_forget_at_a_place_to_resume_from() -> None:
    model, loop = training_loop(table(60), BatchPlan.fit(5, 1))
    loop._measuring = Measuring(4, World.current(), "successive")
    counts = []
    for batch in loop.batches():
        loop.step(batch, squared_error(model))
        counts.append(int(loop._stats._pieces[0]))
        if loop.progress.step == 8:
            loop.reseed()
    assert counts == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]  # step 4 against 3; step 8's was forgotten


def test_of_real_pieces_and_successive_steps_only_the_former_count() -> None:
    stats, one = StepStats(CPU), torch.tensor(1.0)
    real, biased = Pieces(one, 2 * one, 2 * one, 8), Pieces(one, 3 * one, 2 * one, 8, biased=True)
    stats.add_pieces(biased)
    stats.add_pieces(real)
    stats.add_pieces(biased)
    stats.add_pieces(real)
    found = stats.take().pieces
    assert found == PieceSums.of_step(0.0, 8.0) + PieceSums.of_step(0.0, 8.0)
    stats.add_pieces(biased)
    again = StepStats(CPU)
    again.load_state_dict(stats.state_dict())
    again.add_pieces(biased)
    taken = again.take().pieces
    assert taken is not None
    assert (taken.steps, taken.biased) == (2, True)


def test_steps_that_are_not_finite_and_single_pieces_are_left_out() -> None:
    stats = StepStats(CPU)
    one = torch.tensor(1.0)
    for square, squares, number in [
        (one, 2 * one, 2 * one),
        (one * float("nan"), one, 2 * one),
        (one, one * float("inf"), 2 * one),
        (one, one, one),
        (one, one, 0 * one),
    ]:
        stats.add_pieces(Pieces(square, squares, number, 8))
    again = StepStats(CPU)
    again.load_state_dict(stats.state_dict())
    assert again.take().pieces == PieceSums.of_step(0.0, 8.0)
    assert again.take().pieces is None


def test_measuring_keeps_to_its_budget() -> None:
    measuring = Measuring("auto", World(0, 1, CPU))
    assert measuring.every == 10
    assert [step for step in range(25) if measuring.due(step)] == [0, 10, 20]
    for watch, seconds in (
        (measuring.own, 0.001),
        (measuring.plain_steps, 0.01),
        (measuring.measured_steps, 0.012),
    ):
        watch._total_s, watch._uses = seconds * 5, 5
    measuring.adapt(1000)
    # A measured step costs 2 ms more than a plain one of 10 ms.
    assert measuring.every == pytest.approx(0.002 / (BUDGET * 0.01), abs=1)
    measuring.adapt(1000)
    assert measuring.every == 10
    measuring.adapt(7)
    assert measuring.every == 3
    assert not any(Measuring(None, World(0, 1, CPU)).due(step) for step in range(5))
    fixed = Measuring(3, World(0, 1, CPU))
    fixed.adapt(2)
    assert fixed.every == 3


def test_sparse_gradients_are_measured_too() -> None:
    """An embedding's: equal to a dense one's."""
    rows = pa.table(
        {"row": list(range(24)), "word": [n % 5 for n in range(24)], "y": [0.1 * n for n in range(24)]}
    )
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 3, sparse=sparse), nn.Linear(3, 1)).double()

        def loss(batch: Any, model: nn.Module = model) -> Any:
            return ((model(batch["word"]).squeeze(1) - batch["y"]) ** 2).sum(), len(batch["y"])

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = BatchPlan.fit(8, 1, 4)
        loop = TrainingLoop(
            model=model,
            step=OptimizerStep(model, optimizer, World.current(), MixedPrecision("fp64", CPU)),
            schedules=[],
            feed=IndexedFeed(ColumnStore([rows]), rank=0, plan=plan, seed=0, shuffle="none", device=CPU),
            world=World.current(),
            measure_every=1,
        )
        found.append(loop.train_epoch(loss).totals.pieces)
    assert found[0].steps == 3
    assert found[1].variance == pytest.approx(found[0].variance, rel=1e-10)


def test_steps_of_one_row_are_compared_with_the_step_before_where_noise_is_wanted() -> None:
    for lone, steps in (("split", 46), ("none", None)):
        _, totals = measured(torch.float64, BatchPlan.fit(1, 1), "rows", {"lone": lone})
        assert (totals and (totals.steps, totals.biased)) == (steps and (steps, True))


def test_steps_without_weight_are_no_measurements() -> None:
    stats = StepStats(CPU)
    for step, (norm, weight) in enumerate([(2.0, 4.0), (0.0, 0.0), (4.0, 4.0), (0.0, 0.0)], start=1):
        stats.add(step, torch.tensor(norm), torch.tensor(1.0), torch.tensor(weight))
    totals = stats.take()
    assert (totals.grad_norm, totals.num_finite_steps, totals.num_steps) == (3.0, 2, 4)
    assert totals.first_bad_step is None
