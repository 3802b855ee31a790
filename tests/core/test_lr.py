"""LR rules, warm-up and schedule progress: worked values and invariants."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dynbs.core.lr import LR_RULES, ScheduleProgress, warmed_scale

ratios = st.floats(1e-6, 1e6)


@pytest.mark.parametrize(("rule", "ratio", "scale"), [("none", 8, 1), ("linear", 8, 8), ("sqrt", 16, 4)])
def test_worked_values(rule: str, ratio: float, scale: float) -> None:
    assert LR_RULES[rule]().scale(ratio) == scale


@pytest.mark.parametrize("rule", sorted(LR_RULES))
@given(ratio=ratios)
def test_every_rule_is_one_at_the_reference_and_never_falls(rule: str, ratio: float) -> None:
    scale = LR_RULES[rule]().scale
    assert scale(1.0) == 1.0
    assert 0 < scale(ratio) < math.inf
    assert scale(ratio) <= scale(ratio * 2)


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
    [("linear", "sgd", True), ("linear", "adam", False), ("sqrt", "sgd", False), ("sqrt", "adamw", True)],
)
def test_a_rule_says_where_it_does_not_fit(rule: str, optimizer: str, fits: bool) -> None:
    doubt = LR_RULES[rule]().doubt(optimizer)
    assert (doubt is None) is fits
    assert doubt is None or optimizer in doubt
