"""Where a run's rows come from, and whether they are there: looked at without starting Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads

from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError

SPLITS = ("train", "validation")
Source = Any
"""A Parquet path or URI, a list of them, an Arrow table, or a data set of Ray Data."""


class NeedsClusterError(Exception):
    """A task's ``datasets`` uses Ray Data, which has to wait until there is a cluster."""


def resolve_sources(config: Config, task: Any) -> dict[str, Source]:
    """The training and validation sources: the ``data`` section's where it names them, else the task's.

    Raises:
        ConfigError: no training rows are named anywhere, or the task's ``datasets`` names another split.
        NeedsClusterError: the task's ``datasets`` needs Ray, which is not connected.
    """
    named = {split: getattr(config.data, split) for split in SPLITS}
    sources = {split: source for split, source in named.items() if source is not None}
    if "train" not in sources and hasattr(task, "datasets"):
        found = _call_datasets(config, task)
        if not isinstance(found, Mapping) or "train" not in found or set(found) - set(SPLITS):
            shown = sorted(found) if isinstance(found, Mapping) else type(found).__name__
            raise ConfigError(
                f"task {config.task!r}: datasets() returned {shown}; allowed: train, validation"
            )
        sources = {**found, **sources}
    if "train" not in sources:
        raise ConfigError(f"data.train is missing, and task {config.task!r} brings no datasets()")
    return {split: source for split, source in sources.items() if source is not None}


def _call_datasets(config: Config, task: Any) -> Any:
    try:
        return task.datasets(config)
    except Exception as error:
        # By name: importing Ray for this takes longer than all the rest of a check.
        if type(error).__name__ == "RaySystemError" and "has not been started" in str(error):
            raise NeedsClusterError from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"task {config.task!r}: datasets() failed: {reason}") from error


def is_path(source: Source) -> bool:
    """Whether a source is Parquet paths rather than a data set object."""
    return isinstance(source, str) or (isinstance(source, list) and all(isinstance(p, str) for p in source))


def count_rows(split: str, source: Source, columns: list[str] | None, label: str | None = None) -> int | None:
    """Rows of a Parquet source, read from its footers, or of a table; ``None`` for a data set object.

    Raises:
        ConfigError: a file that is missing or no Parquet, a missing column, or no rows at all; names
            the split and the paths.
    """
    if isinstance(source, pa.Table):
        where, names, rows = f"{split} data", source.column_names, source.num_rows
    elif is_path(source):
        where = f"{split} data {source!r}"
        names, rows = _read_footers(where, source)
    else:
        return None
    wanted = columns or ([label] if label else [])
    missing = [column for column in wanted if column not in names]
    if missing:
        raise ConfigError(f"{where}: no column {missing[0]!r}; it has {', '.join(names)}")
    if rows == 0:
        raise ConfigError(f"{where}: no rows; allowed: at least 1")
    return int(rows)


def _read_footers(where: str, source: str | list[str]) -> tuple[list[str], int]:
    paths = [source] if isinstance(source, str) else source
    try:
        parts = [pads.dataset(parquet_files(path), format="parquet", partitioning="hive") for path in paths]
        dataset = pads.dataset(parts)
        return list(dataset.schema.names), dataset.count_rows()
    except FileNotFoundError as error:
        raise ConfigError(f"{where}: no such file or folder") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(
            f"{where}: not readable as Parquet: {' '.join(str(error).split())[:200]}"
        ) from error


def parquet_files(path: str) -> str | list[str]:
    """A file as it is; of a local folder, what Ray Data reads in it: the files named ``*.parquet``."""
    if "://" in path or not Path(path).is_dir():
        return path
    files = sorted(str(file) for file in Path(path).rglob("*.parquet") if file.is_file())
    if not files:
        raise FileNotFoundError(path)
    return files
