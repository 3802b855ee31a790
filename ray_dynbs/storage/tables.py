"""Tables of a record as Parquet: what their columns are, and how they become a file and come back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ray_dynbs.core.errors import ConfigError

EPOCH_SCHEMA = pa.schema(
    [
        ("epoch", pa.int64()),
        ("incarnation", pa.int64()),
        ("global_batch_size", pa.int64()),
        ("micro_batch_size", pa.int64()),
        ("grad_accum_steps", pa.int64()),
        ("world_size", pa.int64()),
        ("steps", pa.int64()),
        ("rows", pa.int64()),
        ("lr", pa.float64()),
        ("lr_scale", pa.float64()),
        ("train_loss", pa.float64()),
        ("val_loss", pa.float64()),
        ("val_metric", pa.float64()),
        ("grad_norm", pa.float64()),
        ("noise_scale", pa.float64()),
        ("memory_fraction", pa.float64()),
        ("samples_per_s", pa.float64()),
        ("epoch_time_s", pa.float64()),
    ]
)
EVALUATION_SCHEMA = pa.schema(
    [
        ("epoch", pa.int64()),
        ("incarnation", pa.int64()),
        ("step", pa.int64()),
        ("samples_seen", pa.int64()),
        ("val_loss", pa.float64()),
        ("val_metric", pa.float64()),
    ]
)


def table_bytes(table: pa.Table) -> bytes:
    """A table as a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue().to_pybytes())


def read_table(data: bytes, where: str) -> pa.Table:
    """A Parquet file's table.

    Args:
        data: The file.
        where: Its name, for a complaint.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        return pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{where}: damaged, not a whole Parquet file: {reason}") from error


def table_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Rows of any keys as a table; a column whose values are of several kinds becomes JSON text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[Any]) -> pa.Array:
    plain = (bool, int, float, str)
    kinds = {type(value) for value in values if value is not None}
    numbers = kinds <= {int, float}
    if numbers or (len(kinds) == 1 and kinds <= set(plain)):
        return pa.array([float(v) if v is not None and kinds == {int, float} else v for v in values])
    if kinds == {list} and all(isinstance(x, float) for v in values if v is not None for x in v):
        return pa.array(values, type=pa.list_(pa.float64()))
    return pa.array([None if value is None else json.dumps(value) for value in values])
