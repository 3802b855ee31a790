"""The feed draws exactly the planned rows, whatever the layout, sizes, workers and shuffle."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.plan import BatchPlan, num_steps
from ray_dynbs.training.columns import ColumnStore
from ray_dynbs.training.feed import IndexedFeed, sequential_batches
from tests.support import split_table, table

CPU = torch.device("cpu")


def rows_by_step(
    store: ColumnStore, plans: list[BatchPlan], epoch: int, **order: object
) -> list[list[list[int]]]:
    """[step][rank] -> row numbers, with plan k taking effect after step k (the last one stays)."""
    world_size = plans[0].world_size
    by_rank = []
    for rank in range(world_size):
        feed = IndexedFeed(store, rank=rank, plan=plans[0], seed=3, device=CPU, **order)  # type: ignore[arg-type]
        steps = []
        for index, step in enumerate(feed.epoch(epoch)):
            pieces = list(step.micro_batches())
            assert all(len(piece["row"]) <= step.plan.micro_batch_size for piece in pieces)
            rows = [row for piece in pieces for row in piece["row"].tolist()]
            assert step.drawn == len(rows)
            steps.append((step.rows, rows))
            feed.set_plan(plans[min(index + 1, len(plans) - 1)])
        by_rank.append(steps)
    assert len({len(steps) for steps in by_rank}) == 1, "ranks took different numbers of steps"
    for at_step in zip(*by_rank, strict=True):
        assert len({planned for planned, _ in at_step}) == 1
        assert sum(len(rows) for _, rows in at_step) == at_step[0][0]
    return [[rows for _, rows in at_step] for at_step in zip(*by_rank, strict=True)]


row_counts = st.sampled_from([1, 2, 3, 5, 7, 13, 64, 97, 100, 101, 251]) | st.integers(1, 300)


plans = st.builds(BatchPlan.fit, st.integers(1, 320), st.integers(1, 9), st.none() | st.integers(1, 40))


@settings(max_examples=250)
@given(data=st.data(), num_rows=row_counts, plan=plans, shuffle=st.sampled_from(["none", "window", "full"]))
def test_every_row_once_and_every_step_exact(
    data: st.DataObject, num_rows: int, plan: BatchPlan, shuffle: str
) -> None:
    cuts = data.draw(st.lists(st.integers(0, num_rows), max_size=6))
    store = ColumnStore(split_table(table(num_rows), cuts))
    size = plan.global_batch_size
    steps = rows_by_step(store, [plan], epoch=data.draw(st.integers(0, 3)), shuffle=shuffle)
    taken = [sum(len(rows) for rows in ranks) for ranks in steps]
    assert taken == [size] * (num_rows // size) + [num_rows % size] * (num_rows % size > 0)
    assert len(steps) == num_steps(num_rows, size)
    assert sorted(row for ranks in steps for rows in ranks for row in rows) == list(range(num_rows))
    for ranks in steps:
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


@settings(max_examples=100)
@given(
    num_rows=row_counts,
    world_size=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 60), min_size=2, max_size=8),
)
def test_a_new_plan_holds_from_the_very_next_step(num_rows: int, world_size: int, sizes: list[int]) -> None:
    plans = [BatchPlan.fit(size, world_size) for size in sizes]
    steps = rows_by_step(ColumnStore([table(num_rows)]), plans, epoch=0, shuffle="full")
    left = num_rows
    for index, ranks in enumerate(steps):
        expected = min(sizes[min(index, len(sizes) - 1)], left)
        assert sum(map(len, ranks)) == expected
        left -= expected
    assert left == 0


def test_what_a_step_contains_does_not_depend_on_workers_micro_batches_or_layout() -> None:
    whole = table(101)
    reference = None
    for world_size, ceiling, cuts in [(1, None, []), (2, 3, [50]), (3, None, [1, 1, 90]), (7, 1, [33])]:
        steps = rows_by_step(
            ColumnStore(split_table(whole, cuts)),
            [BatchPlan.fit(16, world_size, ceiling)],
            2,
            shuffle="window",
        )
        content = [[row for rows in ranks for row in rows] for ranks in steps]
        reference = reference or content
        assert content == reference


def test_an_epoch_goes_on_from_any_row() -> None:
    plan, store = BatchPlan.fit(8, 1), ColumnStore([table(30)])
    feed = IndexedFeed(store, rank=0, plan=plan, seed=0, shuffle="full", device=CPU)
    whole = [batch["row"].tolist() for step in feed.epoch(1) for batch in step.micro_batches()]
    rest = [batch["row"].tolist() for step in feed.epoch(1, first_row=16) for batch in step.micro_batches()]
    assert rest == whole[2:]


@given(num_rows=st.integers(1, 60), world_size=st.integers(1, 7), size=st.integers(1, 20))
def test_evaluation_sees_every_row_once(num_rows: int, world_size: int, size: int) -> None:
    store = ColumnStore([table(num_rows)])
    seen = [
        row
        for rank in range(world_size)
        for batch in sequential_batches(store, rank=rank, world_size=world_size, batch_size=size, device=CPU)
        for row in batch["row"].tolist()
    ]
    assert seen == list(range(num_rows))


def test_batches_are_copies_of_the_stored_rows() -> None:
    """Writing into a batch must not reach memory that other processes map."""
    whole = table(20)
    for blocks in ([whole], split_table(whole, [7])):
        store = ColumnStore(blocks)
        batch = store.gather(np.arange(20))
        batch["y"].fill_(0)
        assert not torch.equal(store.gather(np.arange(20))["y"], batch["y"])
    assert np.abs(whole["y"].to_numpy()).min() > 0


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, 2, 3], pa.int8()), torch.tensor([1, 2, 3], dtype=torch.int8)),
        (pa.array([1, 2, 65535], pa.uint16()), torch.tensor([1, 2, 65535], dtype=torch.int32)),
        (pa.array([1, 2, 3], pa.uint64()), torch.tensor([1, 2, 3])),
        (pa.array([True, False, True]), torch.tensor([True, False, True])),
        (pa.array([[1.0, 2.0]] * 3), torch.tensor([[1.0, 2.0]] * 3, dtype=torch.float64)),
        (pa.array([[[1], [2]]] * 3, pa.list_(pa.list_(pa.int64(), 1), 2)), torch.tensor([[[1], [2]]] * 3)),
        (
            pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(3, 2, 2)),
            torch.arange(12.0, dtype=torch.float64).reshape(3, 2, 2),
        ),
        (pa.chunked_array([[1.0], [2.0, 3.0]]), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)),
    ],
)
def test_column_types(column: pa.Array, expected: torch.Tensor) -> None:
    batch = ColumnStore([pa.table({"c": column})]).gather(np.array([2, 0, 1]))
    assert torch.equal(batch["c"], expected[[2, 0, 1]])
    assert batch["c"].dtype == expected.dtype


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([1.0, None]), "1 nulls"),
        (pa.array([[1.0, None], [2.0, 3.0]]), "1 nulls"),
        (pa.array(["a", "b"]), "is string"),
        (pa.array([2**63], pa.uint64()), "above 2"),
        (pa.array([[1.0], [2.0, 3.0]]), "lengths"),
    ],
)
def test_columns_that_cannot_be_tensors_are_refused_by_name(column: pa.Array, words: str) -> None:
    with pytest.raises(ConfigError, match=f"column 'c'.*{words}"):
        ColumnStore([pa.table({"c": column})])


def test_blocks_of_different_types_are_refused() -> None:
    blocks = [pa.table({"c": pa.array([1])}), pa.table({"c": pa.array([1.5])})]
    with pytest.raises(ConfigError, match=r"column 'c' has blocks of types torch.float64, torch.int64"):
        ColumnStore(blocks)


def test_a_missing_column_is_refused() -> None:
    with pytest.raises(ConfigError, match="column 'z' is missing; the data has"):
        ColumnStore([table(3)], ["z"])
