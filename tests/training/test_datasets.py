"""Torch data sets as a source of rows: any collate function, no way of drawing of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.training.datasets import DatasetStore
from ray_dynbs.training.feed import IndexedFeed

CPU = torch.device("cpu")


class Ragged(Dataset[torch.Tensor]):
    """Row k holds k % 4 numbers, all k."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index % 4,), float(index))


def flat(rows: list[torch.Tensor]) -> dict[str, Any]:
    return {"values": torch.cat(rows), "lengths": torch.tensor([len(row) for row in rows])}


class ByLength(BatchSampler):
    def __init__(self) -> None:
        super().__init__(range(13), 4, False)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_ragged_rows_are_collated_piece_by_piece_never_split() -> None:
    store = DatasetStore.of_loader(DataLoader(Ragged(), batch_size=99, collate_fn=flat))
    feeds = [
        IndexedFeed(store, rank=r, plan=BatchPlan.fit(6, 2, 2), seed=0, shuffle="full", device=CPU)
        for r in (0, 1)
    ]
    numbers: list[float] = []
    for feed in feeds:
        for step in feed.epoch(0):
            for batch in step.micro_batches():
                assert len(batch["lengths"]) <= 2
                assert len(batch["values"]) == batch["lengths"].sum()
                numbers += batch["values"].tolist()
    assert sorted(numbers) == sorted(float(row) for row in range(13) for _ in range(row % 4))


def test_tuples_and_torchs_own_collate_work() -> None:
    store = DatasetStore(TensorDataset(torch.arange(10), torch.arange(10) * 2))
    first, second = store.gather(np.array([3, 1]))
    assert (first.tolist(), second.tolist()) == ([3, 1], [6, 2])


def test_what_a_loader_asks_for_and_does_not_get_is_said() -> None:
    loader = DataLoader(Ragged(), batch_size=4, num_workers=2, drop_last=True, collate_fn=flat)
    (note,) = DatasetStore.of_loader(loader).notes
    assert note.startswith("of the DataLoader, num_workers, drop_last, shuffle=False is not used")


def test_a_distributed_sampler_is_what_prepare_data_loader_adds() -> None:
    data = TensorDataset(torch.arange(7))
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=1))
    assert DatasetStore.of_loader(loader).num_rows == 7


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: DatasetStore(Stream()), "Stream, whose rows cannot be picked by number; allowed: a torch"),
        (lambda: DatasetStore.of_loader(DataLoader(Stream())), "cannot be picked by number"),
        (
            lambda: DatasetStore.of_loader(
                DataLoader(Ragged(), sampler=RandomSampler(Ragged(), replacement=True, num_samples=40))
            ),
            r"RandomSampler\(replacement=True, num_samples=40\), which would be ignored",
        ),
        (lambda: DatasetStore.of_loader(DataLoader(Ragged(), batch_size=None)), "draws by batch_size=None"),
        (lambda: DatasetStore.of_loader(DataLoader(Ragged(), batch_sampler=ByLength())), "draws by ByLength"),
        (lambda: DatasetStore(TensorDataset(torch.empty(0, 2))), "no rows; allowed: at least 1"),
        (
            lambda: DatasetStore.of_loader(
                DataLoader(Ragged(), sampler=WeightedRandomSampler([1.0] * 13, 13), collate_fn=flat)
            ),
            "draws by WeightedRandomSampler, which would be ignored",
        ),
    ],
)
def test_what_has_no_numbered_rows_is_refused(build: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()
