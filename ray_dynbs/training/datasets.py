"""Rows by number out of a map-style torch data set, made into batches by its own collate function."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from ray_dynbs.core.errors import ConfigError

MOST_LOOKED_AT = 256
"""Rows among which the largest one is looked for."""
_PLAIN_SAMPLERS = (RandomSampler, SequentialSampler, DistributedSampler)


class DatasetStore:
    """Random access to the rows of a data set; each micro-batch is collated from its own rows.

    So rows of any shape work, ragged ones included: nothing is ever split after it was collated.

    Args:
        dataset: Has ``__len__`` and ``__getitem__``.
        collate_fn: List of rows -> batch; torch's own if left out.

    Raises:
        ConfigError: it has no length or no rows.
    """

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None = None) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"data is {type(dataset).__name__}, whose rows cannot be picked by number; allowed: a torch "
                "Dataset with __len__ and __getitem__, or a Ray data set in datasets={'train': ...}"
            )
        self._dataset, self._collate = dataset, collate_fn or default_collate
        self.num_rows = len(dataset)
        self.notes: list[str] = []
        if self.num_rows < 1:
            raise ConfigError("data has no rows; allowed: at least 1")

    @classmethod
    def of_loader(cls, loader: DataLoader[Any]) -> DatasetStore:
        """A loader's data set and collate function; sizes and order of batches are this library's.

        Raises:
            ConfigError: it draws rows in a way of its own, which would be lost.
        """
        if not isinstance(loader.dataset, IterableDataset):
            _refuse_own_ways(loader)
        store = cls(loader.dataset, loader.collate_fn)
        ignored = {
            "num_workers": loader.num_workers > 0,
            "drop_last": bool(loader.drop_last),
            "shuffle=False": isinstance(loader.sampler, SequentialSampler),
        }
        names = ", ".join(name for name, is_set in ignored.items() if is_set)
        if names:
            store.notes.append(f"of the DataLoader, {names} is not used: order and batches come from dynbs")
        return store

    def gather(self, rows: npt.NDArray[np.int64]) -> Any:
        """The rows with these numbers, collated."""
        return self._collate([self._dataset[int(row)] for row in rows])

    def largest_row(self) -> int:
        """The row with the most numbers in it, of :data:`MOST_LOOKED_AT`.

        They are looked at from all over the data set, which may be sorted by size; always the same ones,
        since a data set may draw random numbers of its own.
        """
        largest, most = 0, -1
        for row in itertools.islice(_scattered(self.num_rows), MOST_LOOKED_AT):
            size = _numbers_in(self.gather(np.array([row])))
            if size > most:
                largest, most = row, size
        return largest


def _scattered(num_rows: int) -> Iterator[int]:
    """Every row once: the last one first, then in strides of the golden section."""
    stride = max(round(num_rows * 0.618), 1)
    while math.gcd(stride, num_rows) != 1:
        stride += 1
    yield from ((num_rows - 1 + each * stride) % num_rows for each in range(num_rows))


def _numbers_in(batch: Any) -> int:
    """How many numbers a batch holds, in whatever lists, tuples and dictionaries."""
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    if isinstance(batch, Mapping):  # transformers' batches too
        return sum(_numbers_in(value) for value in batch.values())
    if isinstance(batch, list | tuple):
        return sum(_numbers_in(value) for value in batch)
    if dataclasses.is_dataclass(batch):
        return sum(_numbers_in(value) for value in vars(batch).values())
    return 0


def _refuse_own_ways(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose way of drawing rows would be lost: every row is used once per pass.

    Raises:
        ConfigError: names what draws.
    """
    sampler = getattr(loader.sampler, "sampler", loader.sampler)
    own = None
    if not isinstance(sampler, _PLAIN_SAMPLERS):
        own = type(sampler).__name__
    elif isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(loader.dataset)  # type: ignore[arg-type]
    ):
        own = f"RandomSampler(replacement={sampler.replacement}, num_samples={sampler.num_samples})"
    elif loader.batch_sampler is None:
        own = "batch_size=None"
    elif type(loader.batch_sampler) is not BatchSampler:
        own = type(loader.batch_sampler).__name__
    if own is not None:
        raise ConfigError(
            f"the DataLoader draws by {own}, which would be ignored: every row is used once per pass; "
            "allowed: random or sequential order (weight rows in the loss instead)"
        )
