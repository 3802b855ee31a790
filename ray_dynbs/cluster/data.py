"""From a source to blocks that every worker reads by reference.

The pipeline is materialised once, in the driver, before the workers start: it then needs no CPU beside
theirs, and an epoch starts without a new executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.data

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.tasks.sources import Source, is_path


@dataclass(frozen=True)
class Blocks:
    """A materialised data set, by reference.

    Attributes:
        refs: References to its Arrow tables, in row order.
        num_rows: Rows over all of them.
    """

    refs: list[ray.ObjectRef[Any]]
    num_rows: int


def materialize(split: str, source: Source, columns: Sequence[str] | None) -> tuple[Blocks, ray.data.Dataset]:
    """Run a source's pipeline once.

    Args:
        split: Its name, for messages.
        source: Parquet paths, or a data set of Ray Data.
        columns: Columns to keep, or ``None`` for all.

    Returns:
        The blocks, and the data set that owns them: keep it as long as the blocks are used.

    Raises:
        ConfigError: there are no rows.
    """
    context = ray.data.DataContext.get_current()
    # Row numbers are positions in the data set: they must not depend on which read ended first.
    context.execution_options.preserve_order = True
    dataset = ray.data.read_parquet(source) if is_path(source) else source
    if columns is not None:
        dataset = dataset.select_columns(list(columns))
    dataset = dataset.materialize()
    num_rows = dataset.count()
    if num_rows == 0:
        raise ConfigError(f"{split} data: no rows; allowed: at least 1")
    return Blocks(dataset.to_arrow_refs(), num_rows), dataset


def fetch(blocks: Blocks) -> list[Any]:
    """The tables on this node, mapped rather than copied where they already lie there."""
    return list(ray.get(blocks.refs))
