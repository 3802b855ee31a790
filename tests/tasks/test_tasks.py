"""The ready-made tasks: losses are sums, weights are what the mean divides by, models learn."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.tasks import bytes_lm, digits
from ray_dynbs.tasks.trial import try_task
from ray_dynbs.training.columns import ColumnStore

ROWS = pa.table({"a": pa.array(np.arange(40.0), pa.float32())})


def config(task: str, **task_args: Any) -> Config:
    optimizer = {"name": "adam", "lr": 0.01}
    return Config.model_validate({"task": task, "epochs": 1, "optimizer": optimizer, "task_args": task_args})


def test_the_digits_are_all_there() -> None:
    files = digits.datasets(config("digits"))
    tables = {split: pq.read_table(path) for split, path in files.items()}
    assert {split: table.num_rows for split, table in tables.items()} == {"train": 1437, "validation": 360}
    labels = torch.tensor(tables["train"]["label"].to_pylist()).bincount()
    assert labels.min() >= 139
    pixels = ColumnStore([tables["validation"]]).gather(torch.arange(360).numpy())["pixels"]
    assert pixels.shape == (360, 64)
    assert (pixels.min(), pixels.max()) == (0, 16)


def test_a_byte_model_counts_bytes_and_starts_near_ignorance() -> None:
    small = config("bytes_lm", megabytes=0.02, context=32, layers=1, width=32, heads=2)
    tables = bytes_lm.datasets(small)
    assert tables["train"].num_rows > 9 * tables["validation"].num_rows > 0
    batch = ColumnStore([tables["train"]]).gather(torch.arange(16).numpy())
    assert batch["text"].shape == (16, 33)
    model = bytes_lm.build_model(small)
    total, weight = bytes_lm.loss(model, batch)
    assert weight == 16 * 32
    assert total.item() / weight == pytest.approx(math.log(256), rel=0.1)
    parts = [bytes_lm.loss(model, {"text": piece}) for piece in batch["text"].split([5, 11])]
    assert sum(part[0].item() for part in parts) == pytest.approx(total.item(), rel=1e-5)


def test_a_byte_model_sees_only_the_past() -> None:
    model = bytes_lm.build_model(config("bytes_lm", context=16, layers=2, width=16, heads=2)).eval()
    text = torch.randint(0, 256, (1, 16))
    changed = text.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_a_bigram_table_is_what_a_model_has_to_beat() -> None:
    """On independent draws from two bytes it reaches their entropy; on this text about 2.4 nats per byte."""
    coins = np.random.default_rng(0).choice(np.array([65, 66], np.uint8), p=[0.25, 0.75], size=(2, 3000, 129))
    entropy = -0.25 * np.log(0.25) - 0.75 * np.log(0.75)
    assert bytes_lm.bigram_loss(coins[0], coins[1]) == pytest.approx(entropy, rel=0.01)
    said = bytes_lm.about(config("bytes_lm", megabytes=1.0))
    assert 2.3 < float(said.split()[-4]) < 2.6


def test_a_byte_model_learns() -> None:
    small = config("bytes_lm", megabytes=0.02, context=32, layers=1, width=32, heads=2)
    torch.manual_seed(0)
    model = bytes_lm.build_model(small)
    batch = ColumnStore([bytes_lm.datasets(small)["train"]]).gather(torch.arange(64).numpy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        total, weight = bytes_lm.loss(model, batch)
        (total / weight).backward()
        optimizer.step()
        losses.append(total.item() / weight)
    assert losses[-1] < 3.5 < losses[0]


@pytest.mark.parametrize(
    ("build", "arguments", "words"),
    [
        (bytes_lm.build_model, {"wdth": 3}, "task_args.wdth: unknown key; allowed: megabytes"),
        (bytes_lm.build_model, {"layers": 0}, "task_args.layers is 0; allowed: a number > 0"),
        (bytes_lm.build_model, {"width": 30, "heads": 4}, "allowed: a width that heads divides"),
        (bytes_lm.datasets, {"megabytes": 9e9}, "the standard library here has"),
        (digits.build_model, {"hidden": 3}, "task_args.hidden: unknown key; allowed: channels"),
        (digits.build_model, {"channels": [1]}, "two whole numbers"),
    ],
)
def test_wrong_arguments_are_refused(build: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(config("task", **arguments))


@pytest.mark.parametrize(("most", "tried"), [(None, [16, 8, 8]), (3, [3, 1, 2]), (1, [2, 1, 1])])
def test_a_task_is_tried_on_no_more_rows_than_are_allowed_in_one_forward(
    most: int | None, tried: list[int]
) -> None:
    sizes = []
    whole = config("own")
    limited = whole.model_copy(
        update={"memory": whole.memory.model_copy(update={"max_micro_batch_size": most})}
    )

    def loss(model: Any, batch: Any) -> Any:
        sizes.append(len(batch["a"]))
        return model(batch["a"].reshape(-1, 1)).sum(), len(batch["a"])

    task = SimpleNamespace(build_model=lambda config: torch.nn.Linear(1, 1), loss=loss)
    try_task(limited, task, torch.nn.Linear(1, 1), {"train": ROWS})
    assert sizes == tried


def test_what_this_machine_has_no_memory_for_the_workers_may_have() -> None:
    def loss(model: Any, batch: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 33 GB")

    task = SimpleNamespace(build_model=lambda config: torch.nn.Linear(1, 1), loss=loss)
    try_task(config("own"), task, torch.nn.Linear(1, 1), {"train": ROWS})
