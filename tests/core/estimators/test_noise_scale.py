"""The smoothed noise scale on synthetic gradients with a known answer: precision, drift, honesty, JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators import Estimate, NoiseScale, PieceSums, from_pieces

TRUE, DIMENSIONS, ROWS = 100.0, 200, 8


def draw(
    pieces: int, steps: int, seeds: int, variance: Callable[[int], float] = lambda step: TRUE
) -> Iterator[list[PieceSums]]:
    """For each seed the steps' sums: |G|^2 = 1, every piece of 8 rows (of 4 to 12 where it is ragged)."""
    scale = np.sqrt([variance(step) / DIMENSIONS for step in range(steps)])
    true = np.zeros(DIMENSIONS)
    true[0] = 1.0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        gradients = rng.standard_normal((steps, pieces, DIMENSIONS), dtype=np.float32) / np.sqrt(ROWS)
        gradients = true + gradients * scale[:, None, None]
        n = (gradients.mean(axis=1) ** 2).sum(axis=1)
        q = (gradients**2).sum(axis=2).mean(axis=1)
        grad, var = (pieces * n - q) / (pieces - 1), pieces * ROWS * (q - n) / (pieces - 1)
        yield [PieceSums.of_step(float(g), float(v)) for g, v in zip(grad, var, strict=True)]


def final(estimator: NoiseScale, sums: list[PieceSums], every: int = 1) -> Estimate:
    state = estimator.init()
    for start in range(0, len(sums), every):
        group = sums[start : start + every]
        state = estimator.update(state, sum(group[1:], group[0]))
    return estimator.estimates(state)["noise_scale"]


@pytest.mark.parametrize("decay", [0.998, None])
@pytest.mark.parametrize(("pieces", "steps"), [(4, 300), (2, 1000)])
def test_within_ten_percent_in_95_of_100_seeds(decay: float | None, pieces: int, steps: int) -> None:
    """And the truth lies within two of the estimate's own standard errors in at least 90 of 100."""
    estimator = NoiseScale(decay=decay)
    found = [final(estimator, sums, 10) for sums in draw(pieces, steps, 200)]
    near = [abs(estimate.value / TRUE - 1) <= 0.1 for estimate in found]
    covered = [abs(e.value - TRUE) <= 2 * e.relative_error * e.value for e in found]
    assert sum(near) >= 0.95 * 200
    assert sum(covered) >= 0.90 * 200


def test_ragged_pieces_are_as_precise() -> None:
    """Pieces of 1 to 14 rows, weighted by them: the same bar."""
    rows, near, covered = np.array([1, 5, 12, 14]), 0, 0
    shares = rows / rows.sum()
    for seed in range(200):
        rng = np.random.default_rng(seed)
        noise = rng.standard_normal((300, 4, DIMENSIONS), dtype=np.float32)
        gradients = noise * np.sqrt(TRUE / DIMENSIONS / rows)[None, :, None]
        gradients[:, :, 0] += 1.0
        n = (np.einsum("j,tjd->td", shares, gradients) ** 2).sum(axis=1)
        q = (gradients**2).sum(axis=2) @ shares
        sums = [PieceSums.of_step(*from_pieces(float(a), float(b), 4, 32)) for a, b in zip(n, q, strict=True)]
        found = final(NoiseScale(), sums, 10)
        near += abs(found.value / TRUE - 1) <= 0.1
        covered += abs(found.value - TRUE) <= 2 * found.relative_error * found.value
    assert near >= 0.95 * 200
    assert covered >= 0.90 * 200


def test_a_plain_mean_is_as_good() -> None:
    near = 0
    for sums in draw(4, 300, 200):
        whole = sum(sums[1:], sums[0])
        near += abs(whole.variance / whole.grad_sq / TRUE - 1) <= 0.1
    assert near >= 0.95 * 200


@pytest.mark.parametrize("start", [2.0, 100.0])
def test_a_noise_scale_that_rises_fifty_fold_is_followed(start: float) -> None:
    """Over 4,000 steps by a growing variance, from far below and from above the batch: within 1.5."""

    def rising(step: int) -> float:
        return start * 50 ** (step / 4_000)

    for sums in draw(4, 4_000, 10, rising):
        estimator, state, worst = NoiseScale(), NoiseScale().init(), 1.0
        for step in range(0, 4_000, 20):
            group = sums[step : step + 20]
            state = estimator.update(state, sum(group[1:], group[0]))
            if step >= 500:
                ratio = estimator.estimates(state)["noise_scale"].value / rising(step + 20)
                worst = max(worst, ratio, 1 / ratio)
        assert worst <= 1.5


def test_averages_are_divided_last() -> None:
    """The mean of per-step ratios is off by far more on the same numbers."""
    (sums,) = draw(2, 2_000, 1)
    ratios = np.mean([each.variance / each.grad_sq for each in sums])
    assert final(NoiseScale(), sums).value == pytest.approx(TRUE, rel=0.08)
    assert abs(ratios / TRUE - 1) > 0.15


def test_how_steps_are_grouped_into_decisions_hardly_matters() -> None:
    (sums,) = draw(4, 900, 1)
    alone = final(NoiseScale(), sums).value
    assert final(NoiseScale(), sums, 30).value == pytest.approx(alone, rel=0.03)


def test_real_pieces_replace_what_was_biased_and_are_not_diluted() -> None:
    estimator = NoiseScale()
    state = estimator.update(estimator.init(), PieceSums.of_step(1.0, 50.0, biased=True))
    assert estimator.estimates(state)["noise_scale"] == Estimate(50.0, math.inf, biased=True)
    state = estimator.update(state, PieceSums.of_step(1.0, 100.0))
    again = estimator.update(state, PieceSums.of_step(1.0, 5.0, biased=True))
    assert again == state
    assert estimator.estimates(state)["noise_scale"].value == pytest.approx(100.0)
    assert not estimator.estimates(state)["noise_scale"].biased


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_or_not_there_changes_nothing(bad: float) -> None:
    estimator = NoiseScale()
    state = estimator.update(estimator.init(), PieceSums.of_step(1.0, 2.0))
    for sums in (None, PieceSums.of_step(bad, 1.0), PieceSums(0, 1.0, 1.0, 1.0, 1.0, 1.0)):
        assert estimator.update(state, sums) == state
    assert estimator.estimates(estimator.init()) == {}


def test_a_gradient_lost_in_noise_is_said_to_be() -> None:
    estimator = NoiseScale()
    state = estimator.update(estimator.init(), PieceSums.of_step(-0.5, 2.0))
    assert estimator.estimates(state)["noise_scale"] == Estimate(math.inf, math.inf)


def test_the_state_survives_json_and_another_setting_starts_anew() -> None:
    estimator = NoiseScale()
    (sums,) = draw(4, 40, 1)
    state = estimator.init()
    for each in sums:
        state = estimator.restored(json.loads(json.dumps(estimator.update(state, each))))
    assert estimator.estimates(state)["noise_scale"] == final(estimator, sums)
    assert NoiseScale(decay=0.5).restored(state) == NoiseScale(decay=0.5).init()
    with pytest.raises(ConfigError, match=r"decay is 1\.0; allowed: >= 0 and < 1"):
        NoiseScale(decay=1.0)
