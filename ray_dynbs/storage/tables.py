"""Rows as Parquet where their columns are not known beforehand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def parquet_bytes(rows: Sequence[dict[str, Any]]) -> bytes:
    """Rows of any keys as a Parquet file; a column whose values are of several kinds becomes JSON text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


def _column(values: list[Any]) -> pa.Array:
    plain = (bool, int, float, str)
    kinds = {type(value) for value in values if value is not None}
    numbers = kinds <= {int, float}
    if numbers or (len(kinds) == 1 and kinds <= set(plain)):
        return pa.array([float(v) if v is not None and kinds == {int, float} else v for v in values])
    if kinds == {list} and all(isinstance(x, float) for v in values if v is not None for x in v):
        return pa.array(values, type=pa.list_(pa.float64()))
    return pa.array([None if value is None else json.dumps(value) for value in values])
