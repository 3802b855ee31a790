"""Worked values of the published formulas, as they are printed there or computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dynbs.core.coverage import coverage, smallest_covering_batch
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.guards import ClassCoverage, Quantise
from ray_dynbs.core.manager import DynamicBatchSizeManager
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.core.policies import Fixed, Plateau, Schedule
from ray_dynbs.core.policies.norm_test import piece_norm_test, sample_norm_test
from ray_dynbs.core.policy import Policy, Proposal, View
from ray_dynbs.core.signal import Signal

GRADIENTS = np.array([[1.0, 2.0], [3.0, 0.0], [2.0, 2.0], [0.0, 1.0]])


def test_the_sample_norm_test() -> None:
    mean = GRADIENTS.mean(axis=0)
    variance = GRADIENTS.var(axis=0, ddof=1).sum()
    assert mean.tolist() == [1.5, 1.25]
    assert variance == pytest.approx(2.5833333, abs=1e-7)
    found = [sample_norm_test(variance, mean @ mean, theta, 4) for theta in (0.1, 0.25, 0.5)]
    assert found == [68, 11, 4]
    assert (
        math.ceil(variance / (0.25 * mean @ mean)) == 3
    )  # the formula alone, which a passing test overrides


def test_the_piece_norm_test() -> None:
    mean = GRADIENTS.mean(axis=0)
    scatter = ((GRADIENTS - mean) ** 2).sum()
    left, variance = scatter / (4 * 3), 32 / 4 * scatter / 3
    assert left == pytest.approx(0.6458333, abs=1e-7)
    assert variance / 32 == pytest.approx(left)
    assert [piece_norm_test(variance, mean @ mean, eta, 32) for eta in (0.1, 0.25, 0.5)] == [543, 87, 32]
    assert sample_norm_test(1e300, 1e-300, 0.1, 4) == sample_norm_test(1.0, 0.0, 0.1, 4) == 1 << 53


@pytest.mark.parametrize(
    ("weights", "expected"), [([0.9, 0.1], [7, 22, 29, 44]), ([1.0] * 10, [27, 44, 51, 66])]
)
def test_the_smallest_covering_batch(weights: list[float], expected: list[int]) -> None:
    quantiles = (0.5, 0.9, 0.95, 0.99)
    assert [smallest_covering_batch(weights, q) for q in quantiles] == expected
    assert [ClassCoverage(class_counts=weights, quantile=q).floor for q in quantiles] == expected
    assert all(
        smallest_covering_batch(weights, q, exact=False) >= e
        for q, e in zip(quantiles, expected, strict=True)
    )
    assert smallest_covering_batch([1.0] * 10, 0.5, exact=False) == 29


def test_many_classes_agree_with_few_and_with_drawing() -> None:
    weights = np.arange(1, 16, dtype=float)
    shares = weights / weights.sum()
    batch = smallest_covering_batch(weights.tolist(), 0.9)
    draws = np.random.default_rng(0).choice(15, size=(20_000, batch), p=shares)
    covered = np.mean([len(np.unique(row)) == 15 for row in draws])
    assert covered == pytest.approx(coverage(shares.tolist(), batch), abs=0.01)
    assert covered >= 0.89


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], 0.5), "allowed: at least one"),
        (([1.0, 0.0], 0.5), "each > 0"),
        (([1.0], 1.0), "allowed: > 0 and < 1"),
        (([1.0, 1e-9], 0.5), "leave out the rarest"),
        (([1.0] * 1000, 0.5), "takes too long to find; allowed: exact: false"),
    ],
)
def test_what_cannot_be_covered_is_refused(arguments: tuple[list[float], float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        smallest_covering_batch(*arguments)


def proposed(
    piece: Policy, size: int, wanted: int | None = None, state: object = None, **fields: object
) -> int:
    signal = Signal.measured(num_steps=1, num_finite_steps=1, **fields)
    view = View(signal=signal, plan=BatchPlan.fit(size, 1))
    return piece.update(Proposal(wanted or size), state, view)[0].global_batch_size


def test_quantise() -> None:
    assert [proposed(Quantise(powers_of_two=True), 32, n) for n in (31, 33, 63, 64, 1)] == [16, 32, 32, 64, 1]
    assert [proposed(Quantise(multiple_of=24), 48, n) for n in (47, 49, 95, 96, 5)] == [24, 48, 72, 96, 24]
    assert [proposed(Quantise(buckets=[8, 20, 50]), 20, n) for n in (49, 50, 999, 9, 1)] == [20, 50, 50, 8, 8]
    assert proposed(Quantise(powers_of_two=True), 33, 33) == 33  # a size in use is not forced anywhere
    for wrong in ({}, {"multiple_of": 8, "powers_of_two": True}, {"buckets": [8, 8]}, {"buckets": []}):
        with pytest.raises(ConfigError, match="allowed"):
            Quantise(**wrong)


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_quantise_never_moves_the_other_way_nor_further(size: int, wanted: int) -> None:
    for piece in (Quantise(powers_of_two=True), Quantise(multiple_of=24), Quantise(buckets=[3, 40, 41, 900])):
        found = proposed(piece, size, wanted)
        assert (found - size) * (wanted - size) >= 0
        assert found <= max(size, wanted)


def test_the_schedule_table_and_its_ramp() -> None:
    stages = [[0.0, 32.0], [1000.0, 64.0], [3000.0, 128.0]]
    table = Schedule(stages=stages)
    assert [table.size_at(place) for place in (0, 999, 1000, 2999, 3000, 1e9)] == [32, 32, 64, 64, 128, 128]
    ramp = Schedule(stages=stages, ramp=True)
    assert [ramp.size_at(place) for place in (0, 500, 1000, 2000, 3000, 1e9)] == [32, 48, 64, 96, 128, 128]
    assert Schedule(stages=[[5.0, 9.0]]).size_at(4) is None
    assert proposed(Schedule(stages=[[0, 16], [2, 48]], unit="epochs"), 16, epochs_seen=2.0) == 48


@pytest.mark.parametrize(
    "stages",
    [[], [[0]], [[5, 8], [5, 16]], [[9, 8], [5, 16]], [[0, 0]], [[0, 1.5]], [[-1, 8]], [[0, math.inf]]],
)
def test_tables_out_of_order_are_refused(stages: list[list[float]]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        Schedule(stages=stages)


def test_plateau_by_trend_waits_until_it_is_certain() -> None:
    """A loss that falls by 5 % a pass holds, also after a lucky value; one that falls by 0.1 % grows."""

    def sizes(losses: list[float]) -> list[int]:
        manager = DynamicBatchSizeManager(
            32, 4096, policy=Plateau(trend=True, patience=3, min_improvement=0.01)
        )
        found = []
        for epoch, loss in enumerate(losses):
            signal = Signal.measured(
                epoch=epoch,
                epochs_seen=epoch + 1.0,
                plan_version=manager.version,
                num_steps=1,
                num_finite_steps=1,
                val_loss=loss,
            )
            found.append(manager.decide(signal).plan.global_batch_size)
        return found

    rng = np.random.default_rng(0)
    falling = [2.0 * 0.95**epoch * (1 + 0.002 * rng.normal()) for epoch in range(20)]
    assert sizes(falling) == [32] * 20
    lucky = [*falling[:12], falling[11] * 0.8, *falling[12:]]
    assert sizes(lucky)[:13] == [32] * 13
    still = sizes([2.0 * 0.999**epoch * (1 + 0.001 * rng.normal()) for epoch in range(12)])
    assert still[:2] == [32, 32]
    assert still[-1] > 32


def test_memory_that_fills_up_is_said() -> None:
    manager, said = DynamicBatchSizeManager(32, policy=Fixed()), []
    for epoch in range(8):
        signal = Signal.measured(
            epoch=epoch,
            epochs_seen=epoch + 1.0,
            plan_version=manager.version,
            num_steps=1,
            num_finite_steps=1,
            memory_fraction=0.3 + 0.02 * epoch,
        )
        said.append(" ".join(manager.decide(signal).reasons))
    assert "memory rises by 2.0% +- 0.0% a pass under an unchanged micro-batch" in said[-1]
    assert "memory rises" not in said[1]


def test_plateau_grows_when_the_loss_stands_still() -> None:
    policy, state, sizes = Plateau(patience=2, min_improvement=0.05), None, []
    state = policy.init(BatchPlan.fit(8, 1))
    size = 8
    for loss in (2.0, 1.5, 1.49, 1.48, 1.47, 1.2, None, 1.19, 1.18):
        signal = Signal.measured(num_steps=1, num_finite_steps=1, val_loss=loss)
        changed = 0 if sizes[-2:] != sizes[-1:] * 2 and len(sizes) > 1 else 3
        view = View(signal=signal, plan=BatchPlan.fit(size, 1), decisions_since_change=changed)
        proposal, state = policy.update(Proposal(size), state, view)
        size = proposal.global_batch_size
        sizes.append(size)
    assert sizes == [8, 8, 8, 16, 16, 16, 16, 16, 32]


def test_quantiles_next_to_one_are_covered_too() -> None:
    assert smallest_covering_batch([1.0] * 10, 1 - 1e-15) >= 340
    for classes in (10, 13):
        for doubt in (1e-6, 1e-9, 1e-12, 1e-14):
            exact = smallest_covering_batch([1.0] * classes, 1 - doubt)
            bound = smallest_covering_batch([1.0] * classes, 1 - doubt, exact=False)
            assert bound - 1 <= exact <= bound
