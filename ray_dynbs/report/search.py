"""The page of a search: its trials, what mattered, and what time bought."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from ray_dynbs.report.importance import importances
from ray_dynbs.report.page import CSS
from ray_dynbs.report.panels import svg_of
from ray_dynbs.report.trials import point_text, value_text
from ray_dynbs.storage.run_directory import CONFIG, RunDirectory
from ray_dynbs.storage.search_directory import PARAM, SEARCH_PAGE, read_results, read_trials

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
COUNTED = ("finished", "stopped", "cut")
FIXED_POLICY = f"{PARAM}policy.name"
GREY, BLUE, ORANGE = "#9aa0a6", "#0072B2", "#D55E00"


@dataclass(frozen=True)
class Trials:
    """A search as its page sees it.

    Attributes:
        name: Of the search.
        metric: Name and mode of the metric.
        rows: Of ``trials.parquet``, the best first: those that count.
        others: Those that failed, came to nothing, or were not trained.
        results: Trial -> what each epoch came to.
        best: The best trial's id.
        config: The search's own file.
    """

    name: str
    metric: Mapping[str, str]
    rows: tuple[Row, ...]
    others: tuple[Row, ...]
    results: Mapping[str, Sequence[Mapping[str, Any]]]
    best: str
    config: Mapping[str, Any]

    @property
    def sign(self) -> int:
        """1 where more of the metric is better, else -1."""
        return 1 if self.metric["mode"] == "max" else -1

    @property
    def params(self) -> list[str]:
        """The keys searched."""
        names = [name for row in (*self.rows, *self.others) for name in row if name.startswith(PARAM)]
        return list(dict.fromkeys(names))

    @property
    def best_fixed(self) -> Row | None:
        """The best trial of a fixed batch, to compare with, complete if one is; ``None`` without any."""
        base = self.config.get("base", {}).get("policy", {}).get("name")
        fixed = [row for row in self.rows if (row.get(FIXED_POLICY) or base) == "fixed"]
        complete = [row for row in fixed if row["status"] == "finished"]
        return next(iter(complete or fixed), None)

    @property
    def target(self) -> Mapping[str, Any] | None:
        """What trials are ranked by the cost of, where they are."""
        found: Mapping[str, Any] | None = self.config.get("target")
        return found

    @property
    def comparable(self) -> tuple[int, list[Row]]:
        """The last epoch that at least half of the trials reached, and those with what they were worth at it.

        Trials stopped early cannot be compared with complete ones by their last values.
        """
        reached = sorted((len(self.results[row["trial"]]) for row in self.rows), reverse=True)
        epoch = reached[len(reached) // 2] if reached else 0
        rows = [row for row in self.rows if len(self.results[row["trial"]]) >= epoch > 0]
        return epoch, [{**row, "value": self.results[row["trial"]][epoch - 1]["value"]} for row in rows]

    @property
    def front(self) -> list[Row]:
        """Trials that no other one beats in both time and metric, in order of time (Pareto)."""
        found: list[Row] = []
        for row in sorted(self.rows, key=lambda row: (row["time_s"], -self.sign * row["value"])):
            if not found or self.sign * row["value"] > self.sign * found[-1]["value"]:
                found.append(row)
        return found


def write_search_report(folder: RunDirectory, best: str) -> None:
    """Write ``search.html`` into a search's directory.

    Args:
        folder: The directory, with its ``trials.parquet``.
        best: Id of the best trial.
    """
    config = yaml.safe_load(folder.read_text(CONFIG))
    rows = read_trials(folder)
    trained = tuple(row for row in rows if row["status"] in COUNTED and _known(row["value"]))
    others = tuple(row for row in rows if row not in trained)
    results = {row["trial"]: read_results(folder.absolute_uri, row["trial"]) for row in trained}
    metric = config["base"].get("metric") or {}
    named = {"name": metric.get("name", "loss"), "mode": metric.get("mode", "min")}
    trials = Trials(folder.name, named, trained, others, results, best, config)
    folder.write_text(SEARCH_PAGE, render_search(trials))


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def render_search(trials: Trials) -> str:
    """The page."""
    panels: list[Callable[[Axes], None]] = [
        lambda axes: _draw_front(trials, axes),
        lambda axes: _draw_sizes(trials, axes),
        lambda axes: _draw_order(trials, axes),
    ]
    epoch, comparable = trials.comparable
    weights = importances(comparable, trials.params, trials.metric["mode"])
    if weights:
        panels.append(lambda axes: _draw_importance(weights, epoch, axes))
    figures = "".join(f"<figure>{svg_of(panel)}</figure>" for panel in panels)
    title = html.escape(trials.name)
    config = html.escape(yaml.safe_dump(dict(trials.config), sort_keys=False, allow_unicode=True))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}</title><link rel="icon" href="data:,"><style>{CSS}</style></head>\n'
        f"<body><h1>{title}</h1>{_summary(trials)}"
        f'<h2>Trials</h2><div class="panels">{figures}</div>{_table(trials)}'
        f"<details><summary><h2>The search</h2></summary><pre>{config}</pre></details></body></html>\n"
    )


def _summary(trials: Trials) -> str:
    best = next((row for row in trials.rows if row["trial"] == trials.best), None)
    fixed, name = trials.best_fixed, html.escape(trials.metric["name"])
    lines = []
    if best is not None:
        lines.append(
            f"Best: {name} {_with_spread(best)} in {best['time_s']:,.1f} s of training. "
            f"{html.escape(point_text(best))}"
        )
    if fixed is not None:
        lines.append(
            f"Best fixed batch: {name} {_with_spread(fixed)} in {fixed['time_s']:,.1f} s. "
            f"{html.escape(point_text(fixed))}"
        )
    every = (*trials.rows, *trials.others)
    counts = {status: sum(row["status"] == status for row in every) for status in STATUSES}
    lines.append(", ".join(f"{count} {STATUSES[status]}" for status, count in counts.items() if count) + ".")
    if trials.target is not None:
        reached = sum(row["cost"] is not None for row in trials.rows)
        cost, value = html.escape(str(trials.target["cost"])), trials.target["value"]
        lines.append(f"Ranked by {cost} until {name} {value:g}, which {reached} trials reached.")
    return "".join(f"<p>{line}</p>" for line in lines)


STATUSES = {
    "finished": "trials finished",
    "stopped": "stopped early",
    "cut": "cut by the time budget",
    "failed": "failed",
    "filtered": "thrown out by the simulator",
    "unusable": "made no configuration",
}


def _with_spread(row: Row) -> str:
    several = row["values"] is not None and len(row["values"]) > 1
    return f"{row['value']:.4f}" + (f" ± {row['spread']:.4f}" if several else "")


def _draw_front(trials: Trials, axes: Axes) -> None:
    for status, marker in (("finished", "o"), ("stopped", "x"), ("cut", "+")):
        rows = [row for row in trials.rows if row["status"] == status]
        if rows:
            axes.scatter(*_columns(rows), marker=marker, color=GREY, s=28, label=status)
    axes.plot(*_columns(trials.front), color=BLUE, marker="o", markersize=4, label="none beats these")
    fixed = trials.best_fixed
    if fixed is not None:
        axes.axhline(fixed["value"], color=ORANGE, linestyle="--", label="best fixed batch")
        axes.plot([fixed["time_s"]], [fixed["value"]], color=ORANGE, marker="s")
    axes.set_title(f"{trials.metric['name']} against training time (s)", loc="left", fontsize=12)
    axes.legend(fontsize=9)


def _columns(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row["time_s"] for row in rows], [row["value"] for row in rows]


def _draw_sizes(trials: Trials, axes: Axes) -> None:
    for row in trials.rows:
        epochs = trials.results[row["trial"]]
        best = row["trial"] == trials.best
        axes.plot(
            [each["samples"] for each in epochs],
            [each["batch_size"] for each in epochs],
            drawstyle="steps-pre",
            color=BLUE if best else GREY,
            alpha=1.0 if best else 0.5,
            linewidth=2.0 if best else 1.0,
            zorder=3 if best else 2,
        )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.set_title("Global batch size (rows; the best trial's in blue)", loc="left", fontsize=12)
    axes.set_xlabel("samples seen")


def _draw_order(trials: Trials, axes: Axes) -> None:
    began = {row["trial"]: trials.results[row["trial"]][0].get("ready_at", 0.0) for row in trials.rows}
    values = [row["value"] for row in sorted(trials.rows, key=lambda row: began[row["trial"]])]
    so_far = [max(values[: n + 1], key=lambda v: trials.sign * v) for n in range(len(values))]
    numbers = range(1, len(values) + 1)
    axes.scatter(numbers, values, color=GREY, s=28)
    axes.plot(numbers, so_far, color=BLUE, drawstyle="steps-post")
    axes.set_title(f"{trials.metric['name']} of each trial, and the best so far", loc="left", fontsize=12)
    axes.set_xlabel("trial")


def _draw_importance(weights: Mapping[str, float], epoch: int, axes: Axes) -> None:
    names = sorted(weights, key=lambda name: weights[name])
    axes.barh([name.removeprefix(PARAM) for name in names], [weights[name] for name in names], color=BLUE)
    axes.set_title(f"Importance for epoch {epoch} (PED-ANOVA)", loc="left", fontsize=12)


def _table(trials: Trials) -> str:
    head = ["trial", "status", "epochs", trials.metric["name"], "time s", "steps", "batch"]
    if trials.target is not None:
        head.append(f"{trials.target['cost']} to target")
    head += [name.removeprefix(PARAM) for name in trials.params]
    rows = [_table_row(row, trials) for row in (*trials.rows, *trials.others)]
    header = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table><tr>{header}</tr>{"".join(rows)}</table></div>'


def _table_row(row: Row, trials: Trials) -> str:
    cells = [row["trial"] or "-", row["status"], str(row["epochs"])]
    if _known(row["value"]):
        cells += [_with_spread(row)]
        cells += [f"{row['time_s']:,.1f}", f"{row['steps']:,.0f}", f"{row['batch_size']:,.0f}"]
    else:
        cells += ["-"] * 4
    if trials.target is not None:
        cells.append("not reached" if row["cost"] is None else f"{row['cost']:,.4g}")
    cells += ["" if row[name] is None else value_text(row[name]) for name in trials.params]
    kind = "change" if row["trial"] == trials.best else ""
    text = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    more = ""
    if row["error"] is not None:
        more = f'<tr><td class="text" colspan="{len(cells)}">{html.escape(row["error"])}</td></tr>'
    return f'<tr class="{kind}">{text}</tr>{more}'
