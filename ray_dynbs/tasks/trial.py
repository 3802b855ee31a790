"""A task's loss and metrics tried on a few rows: do they run, are they sums, is the metric there?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import torch

from ray_dynbs.config import Config
from ray_dynbs.config.sections import MetricSection
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.tasks.sources import Source, is_path, parquet_files
from ray_dynbs.training.columns import ColumnStore
from ray_dynbs.training.evaluate import batch_sums
from ray_dynbs.training.feed import RowStore, to_device
from ray_dynbs.training.oom import is_out_of_memory
from ray_dynbs.training.sums import PROBE_ROWS, Pair, refuse_mean, untouched

LARGEST_MODEL = 50_000_000
"""Parameters above which a model is not built only to be tried."""


def check_on_rows(
    config: Config, task: Any, model: torch.nn.Module, store: RowStore, *, device: torch.device
) -> None:
    """Evaluate loss and metrics on a few rows and on their halves, without a trace and without a collective.

    Args:
        config: Names the metric that counts.
        task: The user's part.
        model: On ``device``.
        store: Validation rows.
        device: Where to compute.

    Raises:
        ConfigError: the metric that counts is not reported, or something is a mean instead of a sum.
    """
    most = max(min(config.memory.max_micro_batch_size or PROBE_ROWS, PROBE_ROWS), 2)
    rows = np.arange(min(most, store.num_rows))
    half = len(rows) // 2
    pieces = [rows, rows[:half], rows[half:]] if half else [rows]
    with untouched(model):
        found = [_sums(task, model, to_device(store.gather(piece), device), device) for piece in pieces]
    wanted = config.metric.name
    if wanted not in found[0]:
        raise ConfigError(f"metric.name is {wanted!r}; the task reports {', '.join(sorted(found[0]))}")
    if half:
        for name in found[0]:
            what = "loss" if name == "loss" else f"metric {name!r}"
            refuse_mean(what, *(each[name] for each in found))


def _sums(task: Any, model: torch.nn.Module, batch: Any, device: torch.device) -> dict[str, Pair]:
    metrics = getattr(task, "metrics", None)
    sums = batch_sums(
        batch,
        lambda rows: task.loss(model, rows),
        (lambda rows: metrics(model, rows)) if metrics else None,
        device,
    )
    return {name: (float(total), float(weight)) for name, (total, weight) in sums.items()}


def try_task(config: Config, task: Any, model: torch.nn.Module, sources: dict[str, Source]) -> None:
    """Build the model and call loss and metrics on the first rows of the data, on this machine's CPU.

    Left out where the model is large, where a pipeline would have to run for the rows, or where the task
    needs another device.

    Args:
        config: The configuration.
        task: The user's part.
        model: Built already, perhaps without memory for its weights.
        sources: Split -> where its rows come from.

    Raises:
        ConfigError: the loss or a metric fails on the rows, or is none; says which.
    """
    split = "validation" if "validation" in sources else "train"
    first = _first_rows(sources[split], config)
    if first is None or sum(p.numel() for p in model.parameters()) > LARGEST_MODEL:
        return
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    store = ColumnStore([first], config.data.columns, dtype if dtype == torch.float64 else None)
    try:
        real = task.build_model(config).to(dtype)
        # The metric that counts may be missing where there is nothing to validate on.
        named = config if split == "validation" else config.model_copy(update={"metric": MetricSection()})
        check_on_rows(named, task, real, store, device=torch.device("cpu"))
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if any(word in reason.lower() for word in ("cuda", "device", "nvidia")) or is_out_of_memory(error):
            return  # the workers may have what this machine has not
        raise ConfigError(
            f"task {config.task!r}: loss or metrics failed on the first rows, whose columns are "
            f"{', '.join(first.column_names)}: {reason}"
        ) from error


def _first_rows(source: Source, config: Config) -> pa.Table | None:
    if isinstance(source, pa.Table):
        return source.slice(0, PROBE_ROWS)
    if not is_path(source):
        return None
    path = source if isinstance(source, str) else source[0]
    table: pa.Table = pads.dataset(parquet_files(path), format="parquet", partitioning="hive").head(
        PROBE_ROWS, columns=config.data.columns
    )
    return table
