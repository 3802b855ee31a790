"""From sources to blocks that every worker reads by reference.

The pipeline is materialised once, in the driver, before the workers start: it then needs no CPU beside
theirs, and an epoch starts without a new executor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
import ray.data

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.tasks.sources import Source, is_path
from ray_dynbs.training.columns import ColumnStore


@dataclass(frozen=True)
class Blocks:
    """A materialised data set, by reference.

    Attributes:
        refs: References to its Arrow tables, in row order.
    """

    refs: list[ray.ObjectRef[Any]]


@dataclass(frozen=True)
class PreparedData:
    """All splits of a run.

    Attributes:
        blocks: Split -> its blocks.
        num_rows: Split -> its rows.
        owners: The data sets that own the blocks: they live as long as this object does.
    """

    blocks: dict[str, Blocks]
    num_rows: dict[str, int]
    owners: tuple[ray.data.Dataset, ...]


def prepare_data(
    sources: Mapping[str, Source],
    columns: list[str] | None,
    expected: Mapping[str, int | None] | None = None,
) -> PreparedData:
    """Run every source's pipeline once, and see that its rows can become tensors.

    Args:
        sources: Split -> Parquet paths, or a data set of Ray Data.
        columns: Columns to keep, or ``None`` for all.
        expected: Split -> rows counted beforehand, where they were.

    Raises:
        ConfigError: a split without rows, or with other rows than were counted, or with a column that
            holds nulls or no numbers.
    """
    context = ray.data.DataContext.get_current()
    # Row numbers are positions in the data set: they must not depend on which read ended first.
    context.execution_options.preserve_order = True
    blocks, num_rows, owners = {}, {}, []
    for split, source in sources.items():
        dataset = _open(split, source, columns)
        blocks[split] = Blocks(dataset.to_arrow_refs())
        num_rows[split] = _check(split, blocks[split], columns)
        owners.append(dataset)
        counted = (expected or {}).get(split)
        if counted is not None and counted != num_rows[split]:
            raise ConfigError(
                f"{split} data {source!r}: its files hold {counted} rows, but Ray Data reads "
                f"{num_rows[split]}; it takes each file once, and from a folder only those named *.parquet"
            )
    return PreparedData(blocks, num_rows, tuple(owners))


def _open(split: str, source: Source, columns: list[str] | None) -> ray.data.Dataset:
    dataset: ray.data.Dataset = source
    if is_path(source):
        dataset = ray.data.read_parquet(source)
    elif isinstance(source, pa.Table):
        dataset = ray.data.from_arrow(source)
    elif not isinstance(source, ray.data.Dataset):
        raise ConfigError(f"{split} data is {type(source).__name__}; allowed: paths, a table, a Ray data set")
    if columns is not None:
        names = dataset.columns() or []
        missing = [column for column in columns if column not in names]
        if missing:
            raise ConfigError(f"{split} data: no column {missing[0]!r}; it has {', '.join(names)}")
        dataset = dataset.select_columns(columns)
    materialized: ray.data.Dataset = dataset.materialize()
    return materialized


def _check(split: str, blocks: Blocks, columns: list[str] | None) -> int:
    try:
        store = ColumnStore(fetch(blocks), columns)
    except ConfigError as error:
        raise ConfigError(f"{split} data: {error}") from error
    if store.num_rows == 0:
        raise ConfigError(f"{split} data: no rows; allowed: at least 1")
    return store.num_rows


def fetch(blocks: Blocks) -> list[Any]:
    """The tables on this node, mapped rather than copied where they already lie there."""
    return list(ray.get(blocks.refs))
