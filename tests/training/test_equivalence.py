"""One gradient for every split, one trajectory for every number of workers, `fixed` = a plain loop."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dynbs.core.lr import Adjustment
from ray_dynbs.core.order import epoch_order
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.training.columns import ColumnStore
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.step import OptimizerStep
from ray_dynbs.training.world import World
from tests.support import flat_weights, run_ranks, small_model, squared_error, table, training_loop

CPU = torch.device("cpu")
WHOLE = table(101)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)


def plain_loop(steps: int, dtype: torch.dtype, size: int) -> tuple[list[float], np.ndarray]:
    """What a user would write without this library, over the same order of rows."""
    model = small_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = cosine(optimizer)
    x = torch.tensor(np.stack(WHOLE["x"].to_pylist()), dtype=dtype)
    y = torch.tensor(WHOLE["y"].to_numpy(), dtype=dtype)
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        order = torch.from_numpy(epoch_order(101, seed=1, epoch=epoch, shuffle="full"))
        for rows in order.split(size):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x[rows]).squeeze(1), y[rows])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        epoch += 1
    return losses[:steps], flat_weights(model)


def our_loop(
    steps: int, dtype: torch.dtype, size: int, ceiling: int | None
) -> tuple[list[float], np.ndarray]:
    """The same through the loop of this library, in the current process group."""
    plan = BatchPlan.fit(size, World.current().size, ceiling)
    model, loop = training_loop(WHOLE, plan, dtype=dtype, make_scheduler=cosine, clip_grad_norm=2.0)
    losses: list[float] = []
    add = loop._stats.add

    def record(step: int, norm: torch.Tensor, loss_sum: torch.Tensor, weight: torch.Tensor) -> None:
        losses.append((loss_sum / weight).item())
        add(step, norm, loss_sum, weight)

    loop._stats.add = record  # type: ignore[method-assign]
    while len(losses) < steps:
        loop.train_epoch(squared_error(model))
    return losses[:steps], flat_weights(model)


@pytest.mark.parametrize("ceiling", [None, 5])
def test_fixed_on_one_worker_equals_a_plain_loop(ceiling: int | None) -> None:
    """fp32, 7 epochs of 7 steps and a ragged eighth, per-step cosine schedule, clipping: 56 steps."""
    plain_losses, plain_weights = plain_loop(56, torch.float32, 13)
    losses, weights = our_loop(56, torch.float32, 13, ceiling)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(weights, plain_weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [13, 2])
def test_one_two_and_three_workers_share_a_trajectory(size: int) -> None:
    """fp64, at least 200 steps, ragged shares, and (size 2) ranks without rows in every step."""
    plain_losses, plain_weights = plain_loop(204, torch.float64, size)
    for world_size, ceiling in [(1, 4), (2, None), (3, 3)]:
        for losses, weights in run_ranks(our_loop, world_size, 204, torch.float64, size, ceiling):
            np.testing.assert_allclose(losses, plain_losses, rtol=1e-10, atol=1e-10)
            np.testing.assert_allclose(weights, plain_weights, rtol=1e-10, atol=1e-10)


def step_gradient(pieces: list[list[int]], dtype: torch.dtype) -> np.ndarray:
    """The gradient of one step over given pieces of rows (this rank's)."""
    model = small_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    precision = MixedPrecision("fp64" if dtype == torch.float64 else "fp32", CPU)
    step = OptimizerStep(model, optimizer, World.current(), precision)
    store = ColumnStore([WHOLE])
    step.run(
        (store.gather(np.array(piece)) for piece in pieces),
        squared_error(model),
        rows=64,
        adjustment=Adjustment(1.0),
    )
    return step.gradients.flat.double().numpy().copy()


DTYPES = [(torch.float32, 1e-5), (torch.float64, 1e-12)]


def gradients_of_rank(shares: list[list[list[int]]]) -> list[np.ndarray]:
    return [step_gradient(shares[World.current().rank], dtype) for dtype, _ in DTYPES]


@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 64), max_size=8))
def test_any_split_into_micro_batches_has_the_same_gradient(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 64]
    pieces = [list(range(a, b)) for a, b in pairwise(edges) if b > a]
    for dtype, bar in DTYPES:
        whole = step_gradient([list(range(64))], dtype)
        error = np.linalg.norm(step_gradient(pieces, dtype) - whole) / np.linalg.norm(whole)
        assert error <= bar


@pytest.mark.parametrize(
    "shares",
    [
        [[list(range(10))], [list(range(10, 64))]],
        [[], [list(range(64))]],
        [[[0], [1, 2]], [list(range(3, 40))], [list(range(40, 50)), list(range(50, 64))]],
        [[list(range(64))], [], []],
    ],
)
def test_any_split_into_ranks_has_the_same_gradient(shares: Any) -> None:
    gradients = run_ranks(gradients_of_rank, len(shares), shares)
    for index, (dtype, bar) in enumerate(DTYPES):
        whole = step_gradient([list(range(64))], dtype)
        for gradient in gradients:
            assert np.linalg.norm(gradient[index] - whole) / np.linalg.norm(whole) <= bar
