"""One optimizer step: weights, clipping, precision, measurements, refusals."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.lr import Adjustment
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.training.checkpoint import STATE_FILE, TrainState, seed_everything
from ray_dynbs.training.evaluate import evaluate
from ray_dynbs.training.gradients import FlatGradients
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.stats import StepStats
from ray_dynbs.training.step import OptimizerStep
from ray_dynbs.training.world import World
from tests.support import flat_weights, run_ranks, small_model, squared_error, table, training_loop

CPU = torch.device("cpu")


def make_step(model: nn.Module, precision: Any = "fp32", lr: float = 0.1, **options: Any) -> OptimizerStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return OptimizerStep(model, optimizer, World.current(), MixedPrecision(precision, CPU), **options)


def linear() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def weighted(model: nn.Module) -> Any:
    """Loss sum and weight of a batch of (value, weight) pairs; the gradient is their weighted mean."""

    def loss(batch: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
        values, weights = torch.tensor(batch).T
        return (model.weight * values * weights).sum(), weights.sum()

    return loss


def test_token_weights_are_divided_once_over_the_whole_step() -> None:
    """3 tokens at 1.0 and 1 token at 3.0 are 1.5, not 2.0 (formulas, section 8)."""
    model = linear()
    step = make_step(model)
    result = step.run([[(1.0, 3.0)], [(3.0, 1.0)]], weighted(model), rows=2, adjustment=Adjustment(1.0))
    assert model.weight.grad.item() == pytest.approx(1.5)
    assert result.grad_norm.item() == pytest.approx(1.5)
    assert result.weight.item() == 4
    assert model.weight.item() == pytest.approx(-0.15)


def token_gradient(shares: list[Any]) -> float:
    model = linear()
    step = make_step(model)
    step.run(shares[World.current().rank], weighted(model), rows=2, adjustment=Adjustment(1.0))
    assert model.weight.grad is not None
    return model.weight.grad.item()


def test_token_weights_across_ranks() -> None:
    assert run_ranks(token_gradient, 2, [[[(1.0, 3.0)]], [[(3.0, 1.0)]]]) == pytest.approx([1.5, 1.5])


def test_zero_weight_is_no_nan() -> None:
    model = linear()
    step = make_step(model)
    result = step.run([[(5.0, 0.0)], [(2.0, 1.0)]], weighted(model), rows=2, adjustment=Adjustment(1.0))
    assert result.grad_norm.item() == pytest.approx(2.0)
    nothing = step.run([[(5.0, 0.0)]], weighted(model), rows=1, adjustment=Adjustment(1.0))
    assert nothing.grad_norm.item() == 0.0
    assert torch.isfinite(model.weight).all()


def test_the_norm_is_measured_before_clipping() -> None:
    model = linear()
    step = make_step(model, lr=1.0, clip_grad_norm=0.5)
    result = step.run([[(4.0, 1.0)]], weighted(model), rows=1, adjustment=Adjustment(1.0))
    assert result.grad_norm.item() == pytest.approx(4.0)
    assert model.weight.item() == pytest.approx(-0.5, rel=1e-5)


def test_gradients_survive_zero_grad_and_frozen_parameters() -> None:
    model = small_model(torch.float32)
    model[0].bias.requires_grad_(False)
    gradients = FlatGradients(model.parameters(), [torch.optim.SGD(model.parameters(), lr=0.1)])
    assert gradients.flat.numel() == sum(p.numel() for p in model.parameters() if p.requires_grad)
    for _ in range(2):
        gradients.zero()
        model(torch.ones(3, 5)).sum().backward()
        assert gradients.norm().item() == pytest.approx(
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
        )
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_precisions_agree_with_fp32_within_their_own_rounding(precision: str) -> None:
    data = table(64)
    x = torch.tensor(np.stack(data["x"].to_pylist()), dtype=torch.float32)
    norms = []
    for kind in ("fp32", precision):
        model = small_model(torch.float32)
        step = make_step(model, kind, lr=0.0)
        for _ in range(5):  # the fp16 scaler finds its scale by skipping steps
            result = step.run(
                x.split(16), lambda b, m=model: ((m(b) ** 2).sum(), len(b)), rows=64, adjustment=Adjustment()
            )
        assert result.applied
        assert model[0].weight.dtype == torch.float32
        norms.append(result.grad_norm.item())
    assert norms[1] == pytest.approx(norms[0], rel=0.03)


def test_a_step_the_fp16_scaler_skips_changes_nothing_but_the_count() -> None:
    """An overflow: rows are used, weights and schedule stay, the statistics leave it out."""
    model, loop = training_loop(
        table(30),
        BatchPlan.fit(10, 1),
        dtype=torch.float32,
        make_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    )
    precision = MixedPrecision("fp16", CPU)
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    loop._step._precision = precision
    calls = 0
    original = squared_error(model)

    def overflow_in_the_second_step(batch: Any) -> Any:
        nonlocal calls
        calls += model.training
        loss_sum, weight = original(batch)
        return (loss_sum * float("inf") if calls == 2 else loss_sum), weight

    report = loop.train_epoch(overflow_in_the_second_step)
    assert (report.rows, report.steps) == (30, 3)
    assert (report.totals.num_steps, report.totals.num_finite_steps) == (3, 2)
    assert report.totals.first_bad_step == 2
    assert loop.progress.skipped_steps == 1
    assert loop._step.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**2)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize(("precision", "bad_call"), [("fp32", 2), ("fp16", None)])
def test_weights_that_are_spoilt_stop_the_run_and_name_the_step(precision: Any, bad_call: int | None) -> None:
    model, loop = training_loop(table(30), BatchPlan.fit(10, 1), dtype=torch.float32)
    loop._step._precision = MixedPrecision(precision, CPU)
    original, calls = squared_error(model), 0

    def spoil(batch: Any) -> Any:
        nonlocal calls
        calls += model.training
        loss_sum, weight = original(batch)
        return (loss_sum * float("nan") if bad_call in (calls, None) else loss_sum), weight

    with pytest.raises(FloatingPointError, match=rf"not finite in step {bad_call or 1} \(epoch 0\)"):
        loop.train_epoch(spoil)


def test_statistics_leave_non_finite_steps_out() -> None:
    stats = StepStats(CPU)
    for step, norm in enumerate([1.0, float("nan"), 3.0, float("inf")], start=1):
        stats.add(step, torch.tensor(norm), torch.tensor(2.0), torch.tensor(4.0))
    totals = stats.take()
    assert (totals.num_steps, totals.num_finite_steps, totals.first_bad_step) == (4, 2, 2)
    assert totals.grad_norm == 2.0
    assert totals.loss == 0.5
    assert stats.take().num_steps == 0


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.tensor(1.0), "loss returned Tensor"),
        ((torch.ones(3), 3), r"tensor of shape \(3,\)"),
        ((torch.tensor(1.0), torch.ones(2)), r"tensor of shape \(2,\)"),
        ((1.0, 3), "the sum as float"),
    ],
)
def test_a_loss_that_is_no_sum_and_weight_is_told_what_to_be(result: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_step(linear()).run([None], lambda _: result, rows=1, adjustment=Adjustment(1.0))


def test_negative_or_nan_weight_shows_instead_of_training_on() -> None:
    for weight in (-1.0, float("nan")):
        model = linear()
        result = make_step(model).run([[(2.0, weight)]], weighted(model), rows=1, adjustment=Adjustment(1.0))
        assert torch.isnan(result.grad_norm)


def test_parameters_outside_the_model_are_refused() -> None:
    stray = torch.nn.Parameter(torch.zeros(1))
    model = linear()
    optimizer = torch.optim.SGD([*model.parameters(), stray], lr=0.1)
    with pytest.raises(ConfigError, match="parameters that the model has not"):
        OptimizerStep(model, optimizer, World.current(), MixedPrecision("fp32", CPU))


def broadcast_everything() -> list[Any]:
    rank = World.current().rank
    big = torch.full((3, 4), float(rank))
    tensors = [
        torch.full((2,), rank, dtype=torch.int16),
        torch.tensor(bool(rank)),
        torch.full((2,), complex(rank, 1)),
        torch.full((3,), rank, dtype=torch.uint32),
        big[:, :2],
        torch.zeros(0),
    ]
    for tensor in tensors:
        World.current().broadcast_(tensor)
    return [t.tolist() for t in tensors] + [big[:, 2:].tolist()]


def test_tensors_of_every_kind_become_rank_zeros() -> None:
    zero, one = run_ranks(broadcast_everything, 2)
    assert one[:-1] == zero[:-1]
    assert one[-1] == [[1.0, 1.0]] * 3, "what lies beside a view stays"


def test_layers_whose_forward_is_a_collective_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(ConfigError, match="layer 1 is SyncBatchNorm"):
        make_step(model)


@pytest.mark.parametrize("model", [nn.Linear(2, 2).half(), nn.Linear(2, 2).requires_grad_(False)])
def test_parameters_that_do_not_fit_one_buffer_are_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="allowed: "):
        FlatGradients(model.parameters(), [torch.optim.SGD(model.parameters(), lr=0.1)])


def evaluate_share(rows_by_rank: list[int]) -> dict[str, float]:
    world = World.current()
    model = small_model()
    model.train()
    batches = [{"v": torch.arange(float(rows_by_rank[world.rank]))}] if rows_by_rank[world.rank] else []
    found = evaluate(
        model,
        batches,
        lambda b: (b["v"].sum(), len(b["v"])),
        lambda b: {"mean": b["v"].sum(), "ratio": (b["v"].sum(), 2.0)},
        world=world,
        precision=MixedPrecision("fp32", CPU),
    )
    assert model.training, "the mode must be put back"
    return found


def test_evaluation_sums_over_ranks_with_their_weights() -> None:
    for found in run_ranks(evaluate_share, 3, [3, 2, 0]):
        assert found == {"loss": pytest.approx(0.8), "mean": pytest.approx(0.8), "ratio": pytest.approx(1.0)}


def buffers_after_an_epoch() -> np.ndarray:
    model, loop = training_loop(table(20), BatchPlan.fit(8, World.current().size))
    model.register_buffer("seen", torch.tensor([float(World.current().rank)]))
    loop.train_epoch(squared_error(model))
    return model.seen.numpy()  # type: ignore[union-attr,operator]


def test_running_buffers_become_rank_zeros_at_the_end_of_an_epoch() -> None:
    assert [float(b[0]) for b in run_ranks(buffers_after_an_epoch, 2)] == [0.0, 0.0]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_checkpoint_continues_exactly_and_loads_no_code(tmp_path: Path, name: str) -> None:
    def build() -> tuple[nn.Module, Any, TrainState]:
        kind = getattr(torch.optim, name)
        model, loop = training_loop(
            table(40),
            BatchPlan.fit(8, 1),
            make_optimizer=lambda p: kind(p, lr=0.01),
            make_scheduler=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 8]),
        )
        return (
            model,
            loop,
            TrainState(model, loop._step.optimizers[0], loop._schedules[0], MixedPrecision("fp64", CPU)),
        )

    straight_model, straight, _ = build()
    for _ in range(3):
        straight.train_epoch(squared_error(straight_model))
    first_model, first, state = build()
    first.train_epoch(squared_error(first_model))
    state.save(tmp_path, {"progress": first.progress.to_json()})
    model, rest, state = build()
    restored = state.load(tmp_path, CPU)
    rest.progress = type(rest.progress)(**restored["progress"])
    rest.train_epoch(squared_error(model))
    rest.train_epoch(squared_error(model))
    np.testing.assert_array_equal(flat_weights(model), flat_weights(straight_model))
    assert torch.load(tmp_path / STATE_FILE, weights_only=True)["progress"]["progress"]["epoch"] == 1
    _, other = training_loop(table(40), BatchPlan.fit(8, 1))
    wrong = TrainState(
        nn.Linear(3, 3), other._step.optimizers[0], other._schedules[0], MixedPrecision("fp64", CPU)
    )
    with pytest.raises(ConfigError, match="does not fit"):
        wrong.load(tmp_path, CPU)


def test_each_epoch_and_rank_has_its_own_reproducible_random_numbers() -> None:
    drawn = {}
    for key in [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0)]:
        seed_everything(*key)
        numbers = float(torch.rand(())), random.random()
        assert drawn.setdefault(key, numbers) == numbers
    assert len(set(drawn.values())) == 4
