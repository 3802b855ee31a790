"""The page of a search: what it compares, and that it renders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_dynbs.report.importance import importances
from ray_dynbs.report.search import Trials, render_search, write_search_report
from ray_dynbs.storage.run_directory import CONFIG, RunDirectory
from ray_dynbs.storage.search_directory import (
    RESULTS,
    SEARCH_PAGE,
    read_trials,
    trial_directory,
    write_trials,
)
from ray_dynbs.storage.tables import read_table, table_bytes, table_of
from tests.browser import look_at, needs_a_browser


def row(
    trial: str, value: float | None, time_s: float, *, status: str = "finished", **params: Any
) -> dict[str, Any]:
    return {
        "trial": trial,
        "status": status,
        "epochs": 0 if value is None else 4,
        "value": value,
        "spread": 0.01,
        "values": None if value is None else [value - 0.01, value + 0.01],
        "cost": None,
        "time_s": time_s,
        "samples": 100.0,
        "steps": 10.0,
        "batch_size": 32.0,
        "error": "ValueError: <b>worse</b>" if status == "failed" else None,
        **{f"param.{key}": params.get(key) for key in ("policy.name", "optimizer.lr", "lr.rule")},
    }


ROWS = [
    row("c", 0.97, 2.0, **{"optimizer.lr": 0.1, "lr.rule": "linear"}),
    row("b", 0.95, 3.0, **{"policy.name": "fixed"}),
    row("a", 0.90, 1.0, **{"policy.name": "fixed"}),
    row("d", 0.80, 0.5, status="stopped", **{"optimizer.lr": 0.2, "lr.rule": "none"}),
    row("e", None, 0.0, status="failed", **{"optimizer.lr": 0.3, "lr.rule": "none"}),
    row("f", 0.60, 0.9, status="stopped", **{"optimizer.lr": 0.4, "lr.rule": "none"}),
    row("g", 0.99, 0.1, status="failed", **{"optimizer.lr": 0.3, "lr.rule": "none"}),
    row("h", float("nan"), 0.1, **{"optimizer.lr": 0.3, "lr.rule": "none"}),
    row("", None, 0.0, status="filtered", **{"optimizer.lr": 9.0, "lr.rule": "none"}),
]


def epochs(trial: dict[str, Any]) -> list[dict[str, Any]]:
    count = 2 if trial["status"] == "stopped" else 4
    return [
        {"samples": 25.0 * n, "batch_size": 8.0 * n, "value": (trial["value"] or 0) - 0.01 * (count - n)}
        for n in range(1, count + 1)
    ]


def made(tmp_path: Path) -> RunDirectory:
    folder = RunDirectory.create(str(tmp_path), "search")
    config = {"name": "search", "base": {"metric": {"name": "accuracy", "mode": "max"}}, "space": {}}
    folder.write_text(CONFIG, yaml.safe_dump(config))
    write_trials(folder, ROWS)
    for trial in ROWS:
        if trial["trial"]:
            own = trial_directory(folder.absolute_uri, trial["trial"])
            own.make()
            own.write_text(RESULTS, json.dumps(epochs(trial)))
    return folder


def trials() -> Trials:
    trained = tuple(r for r in ROWS if r["trial"] in tuple("abcdf"))
    others = tuple(r for r in ROWS if r["trial"] not in tuple("abcdf"))
    results = {r["trial"]: epochs(r) for r in trained}
    return Trials("s", {"name": "accuracy", "mode": "max"}, trained, others, results, "c", {})


def test_front_reference_and_comparison() -> None:
    found = trials()
    assert [r["trial"] for r in found.front] == ["d", "a", "c"]
    assert found.best_fixed is not None
    assert found.best_fixed["trial"] == "b"
    epoch, rows = found.comparable
    assert epoch == 4
    assert [r["trial"] for r in rows] == ["c", "b", "a"]
    lower = Trials("s", {"name": "loss", "mode": "min"}, found.rows, (), found.results, "d", {})
    assert [r["trial"] for r in lower.front] == ["d", "f"]
    everything = Trials("s", found.metric, found.rows, (), {}, "c", {"base": {"policy": {"name": "fixed"}}})
    assert everything.best_fixed is not None
    assert everything.best_fixed["trial"] == "c"


def test_the_page_says_what_was_found_and_escapes_what_it_shows(tmp_path: Path) -> None:
    folder = made(tmp_path)
    write_search_report(folder, "c")
    page = folder.read_text(SEARCH_PAGE)
    assert "Best: accuracy 0.9700 ± 0.0100 in 2.0 s. optimizer.lr=0.1, lr.rule=linear" in re.sub(
        " of training", "", page
    )
    assert "Best fixed batch: accuracy 0.9500 ± 0.0100" in page
    assert "4 trials finished, 2 stopped early, 2 failed, 1 thrown out by the simulator." in page
    assert "&lt;b&gt;worse&lt;/b&gt;" in page
    assert page.count("<svg") == 3
    assert not re.search(r"<script|src=|href=.http", page)


def test_with_a_target_the_page_ranks_by_its_cost(tmp_path: Path) -> None:
    folder = made(tmp_path)
    config = yaml.safe_load(folder.read_text(CONFIG))
    folder.write_text(CONFIG, yaml.safe_dump({**config, "target": {"value": 0.9, "cost": "samples"}}))
    write_trials(folder, [{**each, "cost": 50.0 if each["trial"] in ("c", "b") else None} for each in ROWS])
    write_search_report(folder, "c")
    page = folder.read_text(SEARCH_PAGE)
    assert "Ranked by samples until accuracy 0.9, which 2 trials reached." in page
    assert "samples to target" in page
    assert page.count("not reached") == len(ROWS) - 2


def test_a_search_in_which_everything_is_alike_still_has_a_page() -> None:
    one = trials()
    alone = Trials("s", one.metric, one.rows[:1], (), one.results, "a", {})
    assert render_search(alone).count("<svg") == 3
    assert alone.comparable[0] == 4


def test_importance_finds_the_key_that_matters() -> None:
    rows = [
        {
            "value": -((0.1 * n - 1.3) ** 2) + 0.001 * (n % 3),
            "param.x": 0.1 * n,
            "param.y": float(n % 7),
            "param.z": "k",
        }
        for n in range(30)
    ]
    found = importances(rows, ["param.x", "param.y", "param.z"], "max")
    assert set(found) == {"param.x", "param.y"}
    assert found["param.x"] > 0.8
    assert importances(rows[:4], ["param.x", "param.y"], "max") == {}
    either = [
        {**r, "param.u": 0.1 * n if n % 2 else None, "param.v": None if n % 2 else 0.1 * n}
        for n, r in enumerate(rows)
    ]
    assert set(importances(either, ["param.u", "param.v", "param.x", "param.y"], "max")) == {
        "param.x",
        "param.y",
    }


def test_rows_of_any_kind_become_columns(tmp_path: Path) -> None:
    folder = RunDirectory.create(str(tmp_path), "rows")
    rows = [
        {"a": 1, "b": "x", "c": [1.0], "d": [1, "x"]},
        {"a": 2.5, "b": None, "c": None, "d": "y", "e": True},
    ]
    write_trials(folder, rows)
    assert read_trials(folder) == [
        {"a": 1.0, "b": "x", "c": [1.0], "d": '[1, "x"]', "e": None},
        {"a": 2.5, "b": None, "c": None, "d": '"y"', "e": True},
    ]
    assert read_table(table_bytes(table_of([])), "empty").num_rows == 0


@needs_a_browser
@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [1200, 400])
def test_a_real_browser_shows_it(width: int, tmp_path: Path) -> None:
    """No console error, every picture drawn, and nothing wider than the window."""
    folder = made(tmp_path)
    write_search_report(folder, "c")
    seen, log = look_at(f"{folder.absolute_uri}/{SEARCH_PAGE}", tmp_path, width)
    assert seen == {"wide": False, "figures": 3, "curves": 3}
    assert [line for line in log.splitlines() if "CONSOLE" in line] == []
