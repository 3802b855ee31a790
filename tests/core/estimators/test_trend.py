"""Lines through recent decisions: exact where there is no noise, honest where there is, anew where told."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from ray_dynbs.core.estimators import NoiseScale
from ray_dynbs.core.estimators.knowledge import Knowledge
from ray_dynbs.core.estimators.trend import KEPT, add_point, no_line, slope
from ray_dynbs.core.signal import Signal


def line(points: list[tuple[float, float]]) -> list[float]:
    found = no_line()
    for x, y in points:
        found = add_point(found, x, y)
    return found


def test_it_is_weighted_least_squares() -> None:
    """Against numpy's, with weights that fall by KEPT from point to point; far from the origin too."""
    rng = np.random.default_rng(0)
    x = np.cumsum(rng.uniform(0.1, 2, 25)) + 1e6
    y = 3.0 - 0.7 * (x - 1e6) + rng.normal(size=25)
    weights = KEPT ** np.arange(24, -1, -1)
    expected = np.polyfit(x - 1e6, y, 1, w=np.sqrt(weights))[0]
    estimate = slope(line(list(zip(x.tolist(), y.tolist(), strict=True))))
    assert estimate is not None
    assert estimate.value == pytest.approx(expected, rel=1e-9)


def test_without_noise_it_is_certain_and_with_two_points_it_knows_no_error() -> None:
    exact = slope(line([(x, 5.0 - 2.0 * x) for x in range(6)]))
    assert exact is not None
    assert exact.value == pytest.approx(-2.0)
    assert exact.relative_error < 1e-6
    two = slope(line([(0, 1.0), (1, 2.0)]))
    assert two is not None
    assert (two.value, two.relative_error) == (1.0, math.inf)
    assert slope(line([(1, 2.0)])) is None
    assert slope(line([(1, 2.0), (1, 3.0)])) is None


def test_two_of_its_errors_cover_the_truth() -> None:
    covered = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        found = slope(line([(x, -0.3 * x + rng.normal()) for x in range(30)]))
        assert found is not None
        covered += abs(found.value + 0.3) <= 2 * found.relative_error * abs(found.value)
    assert covered >= 0.9 * 400


def test_a_slope_that_changes_is_followed_within_some_ten_decisions() -> None:
    ys = np.cumsum([-1.0] * 30 + [0.0] * 14)
    found = slope(line(list(enumerate(ys.tolist()))))
    assert found is not None
    assert abs(found.value) < 0.2


def test_what_overflows_is_left_out() -> None:
    before = line([(0, 1.0), (1, 2.0), (2, 3.0)])
    assert add_point(before, 3, 1e300) == before


def signal(epoch: int, **numbers: float) -> Signal:
    return Signal.measured(epochs_seen=float(epoch), num_steps=1, num_finite_steps=1, **numbers)


def test_the_validation_loss_counts_where_there_is_one_and_memory_by_micro_batch() -> None:
    knowledge, states = Knowledge(), []
    state = knowledge.init()
    for epoch in range(1, 9):
        validated = {"val_loss": 5.0 - epoch} if epoch > 3 else {}
        memory = 0.1 * epoch if epoch < 6 else 0.3
        micro = 8 if epoch < 6 else 16
        seen = signal(epoch, train_loss=2.0 * epoch, memory_fraction=memory, **validated)
        state = json.loads(json.dumps(knowledge.update(state, seen, micro)))
        states.append(knowledge.estimates(state))
    assert states[2].loss_trend is not None
    assert states[2].loss_trend.value == pytest.approx(2.0)
    assert states[3].loss_trend is None  # of something else: it begins anew
    assert states[7].loss_trend is not None
    assert states[7].loss_trend.value == pytest.approx(-1.0)
    assert states[4].memory_trend is not None
    assert states[4].memory_trend.value == pytest.approx(0.1)
    assert states[5].memory_trend is None
    assert states[7].memory_trend is not None
    assert states[7].memory_trend.value == 0.0
    unvalidated = knowledge.update(state, signal(9, train_loss=100.0), 16)
    assert unvalidated["loss"] == state["loss"]  # no validation this time: nothing new of it


def test_the_restored_state_goes_on_and_none_begins_anew() -> None:
    knowledge = Knowledge()
    state = knowledge.update(knowledge.init(), signal(1, train_loss=1.0), 8)
    assert knowledge.restored(json.loads(json.dumps(state))) == state
    other = Knowledge(NoiseScale(decay=0.5))
    assert other.forgets(state)
    assert not knowledge.forgets(state)
    assert other.restored(state)["loss"] == state["loss"]
    assert other.restored(state)["noise"] == other.init()["noise"]
