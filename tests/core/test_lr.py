"""LR rules, warm-up and schedule progress: worked values and invariants."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dynbs.core.estimators import Estimate, Estimates
from ray_dynbs.core.lr import LR_RULES, Adjustment, Noise, Scaling, ScheduleProgress, warmed_scale

ratios = st.floats(1e-6, 1e6)


@pytest.mark.parametrize(
    ("rule", "ratio", "scale"),
    [
        ("none", 8, 1),
        ("linear", 8, 8),
        ("sqrt", 16, 4),
        ("legw", 4, 2),
        ("half_life", 4, 2),
        ("adam_sde", 4, 2),
    ],
)
def test_worked_values(rule: str, ratio: float, scale: float) -> None:
    assert LR_RULES[rule]().scale(ratio) == scale


@pytest.mark.parametrize(
    ("variance", "sq_norm", "ratio", "gain"),
    [
        (3, 1, 2, 1.6),
        (3, 1, 3, 2.0),
        (3, 1, 4, 2.285714),
        (3, 1, 16, 3.368421),
        (0, 1, 7, 1),
        (1, 0, 7, 7),
        (100, 1, 16, 13.931034),
    ],
)
def test_adascale(variance: float, sq_norm: float, ratio: float, gain: float) -> None:
    noise = Noise(variance, sq_norm)
    assert LR_RULES["adascale"]().scale(ratio, noise) == pytest.approx(gain, abs=1e-6)
    assert LR_RULES["adascale_sqrt"]().scale(ratio, noise) == pytest.approx(math.sqrt(gain), abs=1e-6)


def test_adascale_without_a_measurement_never_raises_the_lr() -> None:
    rule = LR_RULES["adascale"]()
    assert [rule.scale(ratio) for ratio in (0.25, 1, 8)] == [0.25, 1, 1]
    known, buried = Estimate(1.0, 0.1), Estimate(-1.0, 9.0)
    found = Noise.of(Estimates(grad_sq_norm=known, grad_variance=Estimate(64.0, 0.1)), 32)
    assert found == Noise(2.0, 1.0, 0.1)
    found = Noise.of(Estimates(grad_sq_norm=buried, grad_variance=known), 32)
    assert found == Noise(1 / 32, 0.0, 9.0)
    assert rule.scale(8, Noise(1.0, 1.0, math.inf)) == 1.0
    assert rule.scale(0.25, Noise(1.0, 1.0, math.inf)) == pytest.approx(0.25)
    assert Noise.of(Estimates(), 32) is None


def test_adascale_takes_the_gain_it_is_sure_of_and_does_not_jump() -> None:
    """From the estimate one error below zero to one error above it the gain changes by little."""
    rule, gains = LR_RULES["adascale"](), []
    for value in np.linspace(-1.0, 1.0, 41):
        grad = Estimate(float(value), 1.0 / abs(value) if value else math.inf)
        noise = Noise.of(Estimates(grad_sq_norm=grad, grad_variance=Estimate(32.0 * 50, 0.01)), 32)
        if value:
            gains.append(rule.scale(16, noise))
    assert 1 < min(gains) < max(gains) < 16
    assert max(abs(a / b - 1) for a, b in itertools.pairwise(gains)) < 0.05
    sure = Noise(50.0, 0.2, 0.001)
    assert rule.scale(16, sure) == pytest.approx(rule.scale(16, Noise(50.0, 0.2)), rel=0.01)
    assert rule.explain(16, Noise(50.0, 0.2, 1.0)) == (
        "adascale: gain 11.8 of 16, 15.1 once |G|^2 is known better",
    )
    assert rule.explain(1, None) == ()
    assert "no gradient noise measured yet" in rule.explain(2, None)[0]


@given(ratio=st.floats(1, 1e4), variance=st.floats(0, 1e6), sq_norm=st.floats(1e-9, 1e6))
def test_adascales_gain_lies_between_one_and_the_ratio(ratio: float, variance: float, sq_norm: float) -> None:
    noise = Noise(variance, sq_norm)
    gain = LR_RULES["adascale"]().scale(ratio, noise)
    assert 1 - 1e-9 <= gain <= ratio * (1 + 1e-9)
    critical = variance / sq_norm
    # McCandlish et al., eq. 2.6, with the noise scale in reference batches.
    assert gain == pytest.approx((1 + critical) / (1 + critical / ratio), rel=1e-6)


def test_adascale_is_invariant_on_the_quadratic() -> None:
    """Gain-weighted steps to a given loss do not depend on the batch (to 2 %).

    Expected loss of SGD on f = |w|^2 / 2 with gradient noise of variance s^2 / k; the exact gain.
    """

    def gained(ratio: float) -> float:
        square, progress, base, variance = 1.0, 0.0, 0.01, 0.5
        while square > 0.05:
            gain = LR_RULES["adascale"]().scale(ratio, Noise(variance, square))
            lr = base * gain
            before = square
            square = (1 - lr) ** 2 * square + lr * lr * variance / ratio
            progress += gain * min((before - 0.05) / (before - square), 1.0)
        return progress

    alone = gained(1)
    assert [gained(ratio) for ratio in (2, 4, 8)] == pytest.approx([alone] * 3, rel=0.02)


def test_adam_sde() -> None:
    rule = LR_RULES["adam_sde"]()
    for ratio, expected in [(2, (0.00141421, 0.8, 0.998, 7.0711e-9)), (4, (0.002, 0.6, 0.996, 5e-9))]:
        found = (1e-3 * rule.scale(ratio), *rule.betas(ratio, (0.9, 0.999)), rule.eps(ratio, 1e-8))
        assert found == pytest.approx(expected, rel=1e-5)
    assert rule.largest_ratio((0.9, 0.999)) == pytest.approx(10)


def test_half_life_and_legw() -> None:
    assert LR_RULES["half_life"]().betas(64 / 512, (0.9, 0.95)) == (0.9, pytest.approx(0.99360885, abs=1e-8))
    legw, epochs = LR_RULES["legw"](), 0.15625
    found = [(4 * legw.scale(b / 512), epochs * legw.warmup(b / 512)) for b in (512, 2048)]
    assert found == [(4, 0.15625), (8, 0.625)]


def test_a_scaling_is_put_together() -> None:
    scaling = Scaling(LR_RULES["legw"](), 512, warmup_epochs=1.0, scale_weight_decay=True)
    adjustment = scaling.at(2048, 2.0, 2.0)
    assert (adjustment.lr, adjustment.ratio, adjustment.weight_decay) == (1.5, 4.0, 2.0)
    assert scaling.at(512, 1.0, 0.0) == Adjustment(1.0, 1.0, scaling.rule, 1.0)


@pytest.mark.parametrize("rule", sorted(LR_RULES))
@given(ratio=ratios)
def test_every_rule_is_one_at_the_reference_and_never_falls(rule: str, ratio: float) -> None:
    for noise in (None, Noise(3.0, 1.0)):
        made = LR_RULES[rule]()
        assert made.scale(1.0, noise) == 1.0
        assert 0 < made.scale(ratio, noise) < math.inf
        assert made.scale(ratio, noise) <= made.scale(ratio * 2, noise)
        assert made.betas(1.0, (0.9, 0.999)) == pytest.approx((0.9, 0.999))
        assert made.eps(1.0, 1e-8) == 1e-8
        assert made.warmup(1.0) == 1.0


def test_warm_up_worked_values() -> None:
    """Goyal et al.: from 0.1 to k=32 over 5 epochs."""
    reached = [0.1 * warmed_scale(32, epoch, 5) for epoch in (0, 1, 2.5, 5, 9)]
    assert reached == pytest.approx([0.1, 0.72, 1.65, 3.2, 3.2], abs=1e-12)


@given(scale=ratios, seen=st.floats(0, 100))
def test_without_warm_up_the_scale_is_untouched(scale: float, seen: float) -> None:
    assert warmed_scale(scale, seen, 0.0) == scale


@given(num_rows=st.integers(1, 500), reference=st.integers(1, 100), data=st.data())
def test_any_history_of_sizes_ends_where_the_reference_would(
    num_rows: int, reference: int, data: st.DataObject
) -> None:
    progress = ScheduleProgress(num_rows, reference)
    plain = 0
    for epoch in range(3):
        left = num_rows
        while left:
            left -= data.draw(st.integers(1, left))
            count = progress.count(epoch, num_rows - left)
            assert count >= plain
            plain = count
        assert plain == (epoch + 1) * progress.steps_per_epoch


@given(num_rows=st.integers(1, 500), reference=st.integers(1, 100))
def test_at_the_reference_size_it_is_once_per_step(num_rows: int, reference: int) -> None:
    progress = ScheduleProgress(num_rows, reference)
    ends = [min(end, num_rows) for end in range(reference, num_rows + reference, reference)]
    assert [progress.count(0, end) for end in ends] == list(range(1, len(ends) + 1))


@pytest.mark.parametrize(
    ("rule", "optimizer", "fits"),
    [
        ("linear", "sgd", True),
        ("linear", "adam", False),
        ("sqrt", "sgd", False),
        ("sqrt", "adamw", True),
        ("adascale", "sgd", True),
        ("adascale", "adam", False),
        ("adascale_sqrt", "adam", True),
        ("adam_sde", "sgd", False),
        ("half_life", "sgd", False),
        ("legw", "sgd", True),
    ],
)
def test_a_rule_says_where_it_does_not_fit(rule: str, optimizer: str, fits: bool) -> None:
    doubt = LR_RULES[rule]().doubt(optimizer)
    assert (doubt is None) is fits
    assert doubt is None or optimizer in doubt
