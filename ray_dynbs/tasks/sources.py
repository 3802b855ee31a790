"""Where a run's rows come from, and whether they are there: looked at without starting Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads

from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError

SPLITS = ("train", "validation")
Source = Any
"""A Parquet path or URI, a list of them, or a data set of Ray Data."""


def resolve_sources(config: Config, task: Any) -> dict[str, Source]:
    """The training and validation sources: the ``data`` section's where it names them, else the task's.

    Raises:
        ConfigError: no training rows are named anywhere, or the task's ``datasets`` fails or names
            another split.
    """
    named = {split: getattr(config.data, split) for split in SPLITS}
    sources = {split: source for split, source in named.items() if source is not None}
    if "train" not in sources and hasattr(task, "datasets"):
        found = task.datasets(config)
        if not isinstance(found, Mapping) or "train" not in found or set(found) - set(SPLITS):
            shown = sorted(found) if isinstance(found, Mapping) else type(found).__name__
            raise ConfigError(
                f"task {config.task!r}: datasets() returned {shown}; allowed: train, validation"
            )
        sources = {**found, **sources}
    if "train" not in sources:
        raise ConfigError(f"data.train is missing, and task {config.task!r} brings no datasets()")
    return {split: source for split, source in sources.items() if source is not None}


def is_path(source: Source) -> bool:
    """Whether a source is Parquet paths rather than a data set object."""
    return isinstance(source, str) or (isinstance(source, list) and all(isinstance(p, str) for p in source))


def count_rows(split: str, source: Source, columns: list[str] | None) -> int | None:
    """Rows of a Parquet source, read from its footers; ``None`` for a data set object.

    Raises:
        ConfigError: a file that is missing or no Parquet, a missing column, or no rows at all; names
            the split and the paths.
    """
    if not is_path(source):
        return None
    where = f"{split} data {source!r}"
    try:
        dataset = _open(source)
        names, rows = dataset.schema.names, dataset.count_rows()
    except FileNotFoundError as error:
        raise ConfigError(f"{where}: no such file or folder") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(
            f"{where}: not readable as Parquet: {' '.join(str(error).split())[:200]}"
        ) from error
    missing = [column for column in columns or () if column not in names]
    if missing:
        raise ConfigError(f"{where}: no column {missing[0]!r}; it has {', '.join(names)}")
    if rows == 0:
        raise ConfigError(f"{where}: no rows; allowed: at least 1")
    return int(rows)


def _open(source: str | list[str]) -> pads.Dataset:
    paths = [source] if isinstance(source, str) else source
    return pads.dataset([pads.dataset(path, format="parquet") for path in paths])
