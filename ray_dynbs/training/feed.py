"""The indexed feed: this rank's micro-batches of the next global batch, whatever the plan now is.

One seeded order per epoch over all rows; a step takes the next ``global_batch_size`` of them, a rank
its share of those. Nothing is fixed ahead, so a new plan holds from the very next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ray_dynbs.core.order import Shuffle, epoch_order
from ray_dynbs.core.plan import BatchPlan, rank_share
from ray_dynbs.training.columns import ColumnStore, TensorBatch


@dataclass(frozen=True)
class StepPlan:
    """One step as the feed hands it out.

    Attributes:
        rows: Rows of the step over all ranks, at least 1.
        first_row: Rows of the epoch used before it.
        plan: The plan it was cut with.
    """

    rows: int
    first_row: int
    plan: BatchPlan


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
        store: ColumnStore,
        *,
        rank: int,
        plan: BatchPlan,
        seed: int,
        shuffle: Shuffle,
        device: torch.device,
    ) -> None:
        self._store, self._rank, self._plan = store, rank, plan
        self._seed, self._shuffle, self._device = seed, shuffle, device
        self.rows_drawn = 0

    @property
    def num_rows(self) -> int:
        """Rows in one pass."""
        return self._store.num_rows

    def set_plan(self, plan: BatchPlan) -> None:
        """Cut every later step by this plan; takes no time and restarts nothing."""
        self._plan = plan

    def epoch(self, epoch: int, first_row: int = 0) -> Iterator[tuple[StepPlan, Iterator[TensorBatch]]]:
        """The steps of one pass, from its ``first_row``-th row on.

        Yields:
            The step, and this rank's micro-batches of it (none where the step has fewer rows than
            ranks). ``rows_drawn`` counts the rows really gathered.
        """
        order = epoch_order(self.num_rows, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        position = first_row
        while position < self.num_rows:
            plan = self._plan
            rows = plan.step_rows(self.num_rows - position)
            indices = order[position : position + rows]
            yield StepPlan(rows, position, plan), self._micro_batches(indices, plan)
            position += rows

    def _micro_batches(self, indices: np.ndarray, plan: BatchPlan) -> Iterator[TensorBatch]:
        for piece in plan.micro_batches(len(indices), self._rank):
            batch = self._store.gather(indices[piece.start : piece.stop])
            self.rows_drawn += len(piece)
            yield _to_device(batch, self._device)


def sequential_batches(
    store: ColumnStore, *, rank: int, world_size: int, batch_size: int, device: torch.device
) -> Iterator[TensorBatch]:
    """This rank's share of every row once, in stored order: for evaluation."""
    share = rank_share(store.num_rows, rank, world_size)
    for start in range(share.start, share.stop, batch_size):
        rows = np.arange(start, min(start + batch_size, share.stop), dtype=np.int64)
        yield _to_device(store.gather(rows), device)


def _to_device(batch: TensorBatch, device: torch.device) -> TensorBatch:
    if device.type == "cpu":
        return batch
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
