"""A search's directory: trials, their table, the best one, the page, beside its ``config.yaml``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ray_dynbs.storage.run_directory import RunDirectory

BEST, TRIALS, SEARCH_PAGE = "best.yaml", "trials.parquet", "search.html"
TRIAL_FOLDERS, RESULTS = "trials", "results.json"
UNSEEN, DECIDED = "unseen.json", "decided"
"""Points that were not trained, and why; a mark in a trial's folder: its end is the search's own decision."""
PARAM = "param."
"""In front of the keys of a point among the columns of ``trials.parquet``."""


def trial_directory(search: str, trial: str) -> RunDirectory:
    """A trial's own folder: its ``results.json``, and a run directory for every seed."""
    return RunDirectory(f"{search}/{TRIAL_FOLDERS}/{trial}")


def read_results(search: str, trial: str) -> list[dict[str, Any]]:
    """What each epoch of a trial came to; empty before the first."""
    found: list[dict[str, Any]] = json.loads(trial_directory(search, trial).read_text(RESULTS) or "[]")
    return found


def read_unseen(search: RunDirectory) -> list[tuple[dict[str, Any], str]]:
    """Points that were not trained, and why."""
    return [(point, why) for point, why in json.loads(search.read_text(UNSEEN) or "[]")]


def write_unseen(search: RunDirectory, points: Sequence[tuple[dict[str, Any], str]]) -> None:
    """Replace them."""
    search.write_text(UNSEEN, json.dumps([list(each) for each in points]))


def write_trials(search: RunDirectory, rows: Sequence[dict[str, Any]]) -> None:
    """Replace ``trials.parquet``."""
    search.write_bytes(TRIALS, parquet_bytes(rows))


def read_trials(search: RunDirectory) -> list[dict[str, Any]]:
    """The rows of ``trials.parquet``."""
    return search.read_rows(TRIALS)


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
