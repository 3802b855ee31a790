"""Cutting a global batch is exact for every size, rank count and micro-batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.plan import BatchPlan, num_steps, rank_share

sizes = st.integers(1, 5_000)
ranks = st.integers(1, 40)


@given(rows=st.integers(0, 5_000), world_size=ranks)
def test_shares_cover_every_row_once_and_differ_by_at_most_one(rows: int, world_size: int) -> None:
    shares = [rank_share(rows, rank, world_size) for rank in range(world_size)]
    assert [row for share in shares for row in share] == list(range(rows))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(size=sizes, world_size=ranks, ceiling=st.none() | sizes, rows=sizes)
def test_micro_batches_rebuild_each_share_within_the_limit(
    size: int, world_size: int, ceiling: int | None, rows: int
) -> None:
    plan = BatchPlan.fit(size, world_size, ceiling)
    rows = min(rows, size)
    for rank in range(world_size):
        pieces = list(plan.micro_batches(rows, rank))
        assert [row for piece in pieces for row in piece] == list(rank_share(rows, rank, world_size))
        assert all(0 < len(piece) <= plan.micro_batch_size for piece in pieces)
        assert len(pieces) <= plan.grad_accum_steps
    if ceiling is not None:
        assert plan.micro_batch_size <= ceiling
    busiest = list(plan.micro_batches(size, 0))
    assert len(busiest) == plan.grad_accum_steps >= 1


@given(rows=sizes, size=sizes)
def test_steps_of_a_pass_use_every_row(rows: int, size: int) -> None:
    plan, left, taken = BatchPlan.fit(size, 1), rows, []
    while left:
        taken.append(plan.step_rows(left))
        left -= taken[-1]
    assert sum(taken) == rows
    assert len(taken) == num_steps(rows, size)
    assert all(t == size for t in taken[:-1])


def test_without_a_ceiling_there_is_nothing_to_accumulate() -> None:
    assert BatchPlan.fit(100, 3) == BatchPlan(global_batch_size=100, micro_batch_size=34, world_size=3)
    assert BatchPlan.fit(100, 3).grad_accum_steps == 1
    assert BatchPlan.fit(100, 3, 10).grad_accum_steps == 4


@pytest.mark.parametrize(("size", "world_size"), [(0, 1), (8, 0), (-1, 2)])
def test_impossible_sizes_are_refused_with_the_number_found(size: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match=f"{size} rows on {world_size} ranks"):
        BatchPlan.fit(size, world_size)


def test_a_micro_batch_above_the_share_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_size is 9; allowed: at most 8"):
        BatchPlan(16, 9, 2)
