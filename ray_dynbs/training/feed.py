"""The indexed feed: this rank's micro-batches of the next global batch, whatever the plan now is.

One seeded order per epoch over all rows; a step takes the next ``global_batch_size`` of them, a rank
its share of those. Nothing is fixed ahead, so a new plan holds from the very next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ray_dynbs.core.order import Shuffle, epoch_order
from ray_dynbs.core.plan import BatchPlan, rank_share

Rows = npt.NDArray[np.int64]


class RowStore(Protocol):
    """Rows by number: a :class:`~ray_dynbs.training.columns.ColumnStore`, or a torch data set."""

    @property
    def num_rows(self) -> int:
        """Rows there are."""

    def gather(self, rows: Rows) -> Any:
        """The rows with these numbers, in this order, as one batch with memory of its own."""

    def largest_row(self) -> int:
        """The number of a row that takes as much memory as any, as far as that can be told quickly."""


class StepBatch:
    """This rank's part of one global batch, not yet gathered.

    Args:
        rows: Rows of the step over all ranks, at least 1.
        first_row: Rows of the pass used before it.
        plan: The plan it is cut by.
        mine: Numbers of this rank's rows, one array per micro-batch; none where there are fewer rows than
            ranks.
        gather: Makes a batch on this rank's device out of row numbers.

    ``drawn`` counts the rows really gathered for it.
    """

    def __init__(
        self, rows: int, first_row: int, plan: BatchPlan, *, mine: list[Rows], gather: Callable[[Rows], Any]
    ) -> None:
        self.rows, self.first_row, self.plan = rows, first_row, plan
        self.drawn = 0
        self._mine, self._gather = mine, gather

    @property
    def num_micro_batches(self) -> int:
        """This rank's micro-batches of it."""
        return len(self._mine)

    def micro_batches(self, *, split: bool = False) -> Iterator[Any]:
        """Gather one micro-batch after the other; may be asked again, for a retry, for the same rows.

        Args:
            split: Make two of a single one, so that there are pieces to compare.
        """
        self.drawn = 0
        pieces = self._mine
        if split and len(pieces) == 1 and len(pieces[0]) > 1:
            half = -(-len(pieces[0]) // 2)
            pieces = [pieces[0][:half], pieces[0][half:]]
        for rows in pieces:
            batch = self._gather(rows)
            self.drawn += len(rows)
            yield batch

    def cut(self, plan: BatchPlan) -> None:
        """Cut the same rows by another plan of the same global batch, as long as none has been trained on.

        Args:
            plan: Of the same ranks.
        """
        rows = np.concatenate(self._mine) if self._mine else np.empty(0, dtype=np.int64)
        step = plan.micro_batch_size
        self.plan = plan
        self._mine = [rows[start : start + step] for start in range(0, len(rows), step)]

    def probe(self, most: int) -> Iterator[Any]:
        """Up to ``most`` of its rows as one batch, as one again, and in two halves; needs two rows."""
        rows = np.concatenate(self._mine)[:most]
        half = len(rows) // 2
        for piece in (rows, rows, rows[:half], rows[half:]):
            yield self._gather(piece)


class IndexedFeed:
    """One rank's view of the passes over a data set.

    Args:
        store: The rows.
        rank: This rank.
        plan: The plan to begin with; replaced by :meth:`set_plan`.
        seed: Seed of the order.
        shuffle: See :func:`~ray_dynbs.core.order.epoch_order`.
        device: Where batches go.
    """

    def __init__(
        self,
        store: RowStore,
        *,
        rank: int,
        plan: BatchPlan,
        seed: int,
        shuffle: Shuffle,
        device: torch.device,
    ) -> None:
        self._store, self._rank, self._plan = store, rank, plan
        self._seed, self._shuffle, self._device = seed, shuffle, device
        self._largest: int | None = None

    @property
    def num_rows(self) -> int:
        """Rows in one pass."""
        return self._store.num_rows

    def largest(self, rows: int) -> Any:
        """A micro-batch of so many rows, each as large as any there is."""
        if self._largest is None:
            self._largest = self._store.largest_row()
        return self._gather(np.full(rows, self._largest, dtype=np.int64))

    def set_plan(self, plan: BatchPlan) -> None:
        """Cut every later step by this plan; takes no time and restarts nothing."""
        self._plan = plan

    def epoch(self, epoch: int, first_row: int = 0) -> Iterator[StepBatch]:
        """The steps of one pass, from its ``first_row``-th row on.

        Yields:
            This rank's part of each step.
        """
        order = epoch_order(self.num_rows, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        position = first_row
        while position < self.num_rows:
            plan = self._plan
            rows = plan.step_rows(self.num_rows - position)
            indices = order[position : position + rows]
            mine = [indices[piece.start : piece.stop] for piece in plan.micro_batches(rows, self._rank)]
            yield StepBatch(rows, position, plan, mine=mine, gather=self._gather)
            position += rows

    def _gather(self, rows: Rows) -> Any:
        return to_device(self._store.gather(rows), self._device)


def sequential_batches(
    store: RowStore, *, rank: int, world_size: int, batch_size: int, device: torch.device
) -> Iterator[Any]:
    """This rank's share of every row once, in stored order: for evaluation."""
    share = rank_share(store.num_rows, rank, world_size)
    for start in range(share.start, share.stop, batch_size):
        rows = np.arange(start, min(start + batch_size, share.stop), dtype=np.int64)
        yield to_device(store.gather(rows), device)


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor of a batch, in whatever lists, tuples and dictionaries, on a device."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch.to(device, non_blocking=True) if hasattr(batch, "to") else batch
