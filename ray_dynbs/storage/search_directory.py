"""A search's directory: trials, their table, the best one, the page, beside its ``config.yaml``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ray_dynbs.storage.run_directory import RunDirectory
from ray_dynbs.storage.tables import table_bytes, table_of

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
    search.write_bytes(TRIALS, table_bytes(table_of(rows)))


def read_trials(search: RunDirectory) -> list[dict[str, Any]]:
    """The rows of ``trials.parquet``."""
    return search.read_rows(TRIALS)
