"""Policies on a quadratic with known noise: they settle where theory says, and then stay.

Far from the minimum the gradient hardly changes, so |G|^2 and tr(Sigma) are constants: a step of B rows
in J pieces draws its pieces' gradients, the manager decides every so many steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ray_dynbs.core.estimators import PieceSums, from_pieces
from ray_dynbs.core.estimators.step_time import best_batch_of_a_line, efficiency
from ray_dynbs.core.manager import DynamicBatchSizeManager
from ray_dynbs.core.policies import FollowNoiseScale, Goodput, NormTest
from ray_dynbs.core.signal import Signal

NOISE_SCALE, DIMENSIONS, PIECES, STEPS = 600.0, 200, 4, 100


def step_sums(rng: np.random.Generator, batch_size: int, steps: int) -> PieceSums:
    """|G|^2 = 1, tr(Sigma) = the noise scale, spread evenly over the dimensions."""
    true = np.zeros(DIMENSIONS)
    true[0] = 1.0
    per_row = NOISE_SCALE / DIMENSIONS
    noise = rng.normal(size=(steps, PIECES, DIMENSIONS)) * np.sqrt(per_row * PIECES / batch_size)
    gradients = true + noise
    n = (gradients.mean(axis=1) ** 2).sum(axis=1)
    q = (gradients**2).sum(axis=2).mean(axis=1)
    sums = [PieceSums.of_step(*from_pieces(a, b, PIECES, batch_size)) for a, b in zip(n, q, strict=True)]
    return sum(sums[1:], sums[0])


def sizes_after(
    policy: Any, start: int, decisions: int, seed: int = 0, step_time: Any = None, **options: Any
) -> list[int]:
    rng = np.random.default_rng(seed)
    manager = DynamicBatchSizeManager(start, 100_000, 1, policy=policy, **options)
    for number in range(decisions):
        pieces = step_sums(rng, manager.get_current_batch_size(), STEPS)
        signal = Signal.measured(
            plan_version=manager.version,
            step=(number + 1) * STEPS,
            num_steps=STEPS,
            num_finite_steps=STEPS,
            pieces=pieces,
            grad_norm=1.0,
            step_time_s=step_time and step_time(manager.plan) * float(np.exp(rng.normal(0, 0.02))),
        )
        manager.decide(signal)
    return manager.batch_size_history


@pytest.mark.parametrize("start", [16, 64, 5_000, 40_000])
@pytest.mark.parametrize("multiplier", [1.0, 0.5])
def test_noise_scale_settles_at_the_noise_scale_from_below_and_above(start: int, multiplier: float) -> None:
    for seed in range(5):
        sizes = sizes_after(FollowNoiseScale(multiplier=multiplier), start, 60, seed)
        assert sizes[-1] == pytest.approx(multiplier * NOISE_SCALE, rel=0.15)
        assert sum(a != b for a, b in zip(sizes[-21:], sizes[-20:], strict=False)) <= 1


@pytest.mark.parametrize(("eta", "unbiased"), [(0.5, False), (0.3, False), (0.5, True)])
def test_norm_test_settles_where_its_bias_puts_it(eta: float, unbiased: bool) -> None:
    """From below at B_simple (1/eta^2 - 1), or without the bias at B_simple / eta^2."""
    expected = NOISE_SCALE * (1 / eta**2 - (0 if unbiased else 1))
    for seed in range(5):
        sizes = sizes_after(NormTest(eta=eta, unbiased=unbiased), 128, 60, seed)
        assert sizes[-1] == pytest.approx(expected, rel=0.15)
        assert sizes == sorted(sizes)
        assert sum(a != b for a, b in zip(sizes[-21:], sizes[-20:], strict=False)) <= 1


@pytest.mark.parametrize("start", [32, 128, 2_000, 10_000])
@pytest.mark.parametrize("knee", [20.0, 200.0])
def test_goodput_settles_where_it_is_within_five_percent_of_the_best(start: int, knee: float) -> None:
    """One rank, steps of ``knee + B``: the best is at sqrt(noise scale x knee), from below and above."""
    reference = 32
    best = max(best_batch_of_a_line(NOISE_SCALE, knee, 1.0), reference)

    def goodput(batch: float) -> float:
        return batch / (knee + batch) * efficiency(batch, NOISE_SCALE, reference)

    for seed in range(3):
        sizes = sizes_after(
            Goodput(),
            start,
            60,
            seed,
            step_time=lambda plan: 1e-3 * (knee + plan.global_batch_size),
            reference_batch_size=reference,
        )
        assert goodput(sizes[-1]) >= 0.95 * goodput(best)
        assert sum(a != b for a, b in zip(sizes[-21:], sizes[-20:], strict=False)) <= 1


def test_a_wrong_number_of_pieces_or_none_holds() -> None:
    manager = DynamicBatchSizeManager(32, policy=FollowNoiseScale())
    for pieces in (None, PieceSums.of_step(float("nan"), 1.0), PieceSums.of_step(-1.0, 2.0)):
        signal = Signal.measured(plan_version=manager.version, num_steps=1, num_finite_steps=1, pieces=pieces)
        assert manager.decide(signal).plan.global_batch_size == 32
    assert "wait" in manager.decisions[-1].reasons[0]
    assert "not finite" in manager.decisions[-2].reasons[0]
