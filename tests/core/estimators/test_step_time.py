"""The step-time model: worked values, fits of what was seen, and nothing beyond it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators.step_time import (
    Observation,
    StepTimeModel,
    as_rows,
    best_batch_of_a_line,
    efficiency,
    fit_step_time,
    from_rows,
)

TRUE = StepTimeModel(
    alpha_c=0.02, beta_c=0.001, alpha_r=0.01, beta_r=0.002, alpha_n=0.05, beta_n=0.005, gamma=1.6
)


@pytest.mark.parametrize(
    ("kind", "seconds", "goodput"),
    [
        ((1, 1, 128, 0), 0.148, 864.865),
        ((1, 4, 64, 0), 0.0869551, 2644.016),
        ((1, 4, 64, 2), 0.2549551, 1921.871),
        ((2, 4, 64, 0), 0.1119634, 2053.446),
    ],
)
def test_worked_values(kind: tuple[int, int, int, int], seconds: float, goodput: float) -> None:
    nodes, ranks, micro, extra = kind
    found = TRUE.seconds(ranks, micro, extra, nodes)
    assert found == pytest.approx(seconds, abs=1e-7)
    batch = ranks * micro * (extra + 1)
    assert batch / found * efficiency(batch, 1000, 128) == pytest.approx(goodput, abs=1e-3)


def test_efficiency() -> None:
    expected = [1, 0.8980892, 0.7460317, 0.5573123, 0.3700787, 0.2213501, 0.1227154]
    found = [efficiency(128 * 2**n, 1000, 128) for n in range(7)]
    assert found == pytest.approx(expected, abs=1e-7)


def observed(
    model: StepTimeModel, kinds: list[tuple[int, int, int]], noise: float = 0.0
) -> list[Observation]:
    rng = np.random.default_rng(0)
    return [
        Observation(ranks, micro, extra, model.seconds(ranks, micro, extra) * math.exp(rng.normal(0, noise)))
        for ranks, micro, extra in kinds
    ]


def test_a_line_is_found_exactly_from_two_sizes() -> None:
    model = fit_step_time(observed(TRUE, [(1, 16, 0), (1, 64, 0)]))
    assert (model.alpha_c, model.beta_c) == pytest.approx((0.02, 0.001), rel=1e-3)
    assert (model.alpha_r, model.alpha_n) == (0.0, 0.0)


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_times_between_and_up_to_twice_what_was_seen_are_predicted(noise: float) -> None:
    kinds = [(1, 16, 0), (1, 64, 0), (2, 16, 0), (2, 64, 0), (4, 32, 0), (4, 64, 1), (4, 64, 3), (2, 32, 1)]
    model = fit_step_time(observed(TRUE, kinds, noise))
    for ranks, micro, extra in [(1, 128, 0), (2, 128, 0), (4, 48, 0), (3, 64, 2)]:
        assert model.seconds(ranks, micro, extra) == pytest.approx(
            TRUE.seconds(ranks, micro, extra), rel=0.1 if noise else 0.03
        )


def test_one_kind_of_step_tells_nothing() -> None:
    with pytest.raises(ConfigError, match="1 kind of step; allowed: at least 2"):
        fit_step_time(observed(TRUE, [(2, 16, 0)] * 3))


def test_the_best_batch_of_a_line_maximises_goodput() -> None:
    best = best_batch_of_a_line(1000, 0.02, 0.001)
    goodput = {b: b / (0.02 + 0.001 * b) * efficiency(b, 1000, 8) for b in range(8, 2000)}
    assert max(goodput, key=lambda b: goodput[b]) == pytest.approx(best, abs=1)


def test_observations_survive_json() -> None:
    seen = observed(TRUE, [(1, 16, 0), (4, 64, 3)])
    assert from_rows(json.loads(json.dumps(as_rows(seen)))) == seen
