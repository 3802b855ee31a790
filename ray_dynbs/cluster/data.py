"""From sources to blocks that every worker reads by reference.

The pipeline is materialised once, in the driver, before the workers start: it then needs no CPU beside
theirs, and an epoch starts without a new executor.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockAccessor

from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.tasks.loading import load_task
from ray_dynbs.tasks.preflight import Preflight
from ray_dynbs.tasks.sources import Source, is_path, resolve_sources
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
        owners: What owns the blocks: they live as long as this object does.
    """

    blocks: dict[str, Blocks]
    num_rows: dict[str, int]
    owners: tuple[Any, ...]


def prepare_run(config: Config, found: Preflight) -> PreparedData:
    """The rows of a configuration, from where the preflight found them or, on this cluster, the task says.

    Raises:
        ConfigError: see :func:`prepare_data`.
    """
    sources = found.sources
    if sources is None:
        sources = resolve_sources(config, load_task(config.task))
    return prepare_data(sources, config.data.columns, found.rows, config.data.timeout_s)


def prepare_data(
    sources: Mapping[str, Source],
    columns: list[str] | None,
    expected: Mapping[str, int | None] | None = None,
    timeout_s: float | None = None,
) -> PreparedData:
    """Run every source's pipeline once, and see that its rows can become tensors.

    Args:
        sources: Split -> Parquet paths, or a data set of Ray Data.
        columns: Columns to keep, or ``None`` for all.
        expected: Split -> rows counted beforehand, where they were.
        timeout_s: Longest wait for a pipeline's first rows; ``None`` for no limit.

    Raises:
        ConfigError: a split without rows, or with other rows than were counted, or with a column that
            holds nulls or no numbers.
    """
    blocks, num_rows, owners = {}, {}, []
    for split, source in sources.items():
        blocks[split], owned = _materialize(split, source, columns, timeout_s)
        num_rows[split] = _check(split, blocks[split], columns)
        owners += owned
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
    # Row numbers are positions in the data set: they must not depend on which read ended first. A data set
    # keeps the options it was made with, so they are set on itself.
    dataset.context.execution_options.preserve_order = True
    if columns is not None:
        names = dataset.columns() or []
        missing = [column for column in columns if column not in names]
        if missing:
            raise ConfigError(f"{split} data: no column {missing[0]!r}; it has {', '.join(names)}")
        dataset = dataset.select_columns(columns)
    return dataset


def _materialize(
    split: str, source: Source, columns: list[str] | None, timeout_s: float | None
) -> tuple[Blocks, list[Any]]:
    """Run a pipeline to its end, unless its first rows do not come.

    Returns:
        Its blocks as Arrow tables, and what has to live as long as they do.

    Raises:
        ConfigError: no rows came in time; says what the cluster has free.
    """
    bundles: list[Any] = []
    datasets: list[Any] = []
    news: queue.SimpleQueue[BaseException | bool] = queue.SimpleQueue()

    def run() -> None:
        try:
            datasets.append(_open(split, source, columns))  # may run a part of it to learn its columns
            for bundle in datasets[0].iter_internal_ref_bundles():
                bundles.append(bundle)
                news.put(False)
            news.put(True)
        except BaseException as error:  # noqa: BLE001  # raised again by the caller
            news.put(error)

    threading.Thread(target=run, name="ray-dynbs-materialize", daemon=True).start()
    try:
        done = news.get(timeout=timeout_s)
    except queue.Empty:
        # Abandoned: it complains once the cluster ends, which is no news.
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        there = ray.cluster_resources().get("CPU", 0.0)
        free = ray.available_resources().get("CPU", 0.0)
        raise ConfigError(
            f"{split} data: no rows came within {timeout_s:g} s (timeout_s); its pipeline waits for the "
            f"cluster, which has {free:g} of {there:g} CPU free, or for itself"
        ) from None
    while done is False:
        done = news.get()
    if isinstance(done, BaseException):
        raise done
    refs = [
        _as_table(entry.ref, piece, bundle.schema)
        for bundle in bundles
        for entry, piece in zip(bundle.blocks, bundle.slices, strict=True)
    ]
    return Blocks(refs), [*datasets, *bundles]


def _as_table(ref: Any, piece: Any, schema: Any) -> Any:
    """A block by reference, made into an Arrow table where it is none, and cut where only a part counts."""
    if piece is None and isinstance(schema, pa.Schema):
        return ref
    start, stop = (None, None) if piece is None else (piece.start_offset, piece.end_offset)
    convert: Any = _convert
    return convert.remote(ref, start, stop)


@ray.remote(num_cpus=0)
def _convert(block: Any, start: int | None, stop: int | None) -> pa.Table:
    table = BlockAccessor.for_block(block).to_arrow()
    return table if start is None or stop is None else table.slice(start, stop - start)


def _check(split: str, blocks: Blocks, columns: list[str] | None) -> int:
    try:
        store = ColumnStore(fetch(blocks), columns)
    except ConfigError as error:
        raise ConfigError(f"{split} data: {error}") from error
    if store.num_rows == 0:
        raise ConfigError(f"{split} data: no rows; allowed: at least 1")
    return store.num_rows


def fetch(blocks: Blocks, timeout_s: float | None = None) -> list[Any]:
    """The tables on this node, mapped rather than copied where they already lie there.

    Raises:
        TimeoutError: they did not come in time.
    """
    try:
        # Where Arrow and pandas blocks are mixed, the schema of a bundle does not tell which ones are which.
        return [
            block if isinstance(block, pa.Table) else BlockAccessor.for_block(block).to_arrow()
            for block in ray.get(blocks.refs, timeout=timeout_s)
        ]
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(
            f"the first batch did not come: {len(blocks.refs)} blocks of data are not on this node after "
            f"{timeout_s:g} s (timeout_s)"
        ) from error
