"""The trials of a search while they end: a line each, or a table that grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ray_dynbs.report.live import NotebookTable, TerminalTable
from ray_dynbs.storage.search_directory import PARAM

Row = Mapping[str, Any]
"""A row of ``trials.parquet``."""
_ROWS_BESIDE = 6
"""Lines of a screen that are not trials."""


def trial_line(row: Row, metric: str, cost: str | None) -> str:
    """What a trial came to, and where in the space it was.

    Args:
        row: The trial.
        metric: Name of the metric.
        cost: What trials are ranked by the cost of, where they are: ``time_s``, ``samples`` or ``steps``.
    """
    if row["error"]:
        return f"failed: {row['error']}; {point_text(row)}"
    if not row["epochs"]:
        return f"{row['status']} before its first epoch; {point_text(row)}"
    how = "" if row["status"] == "finished" else f" ({row['status']})"
    spent = "" if cost is None else f", {_cost(row, cost)}"
    return f"{metric} {_value(row)} in {row['epochs']} epochs{how}{spent}; {point_text(row)}"


def _value(row: Row) -> str:
    spread = f" +- {row['spread']:.4f}" if len(row["values"]) > 1 else ""
    return f"{row['value']:.4f}{spread}"


def _cost(row: Row, cost: str) -> str:
    return "target not reached" if row["cost"] is None else f"{cost} {row['cost']:,.4g}"


def point_text(row: Row) -> str:
    """Where in the space a trial was; keys that it has not, being conditional, are left out."""
    pairs = [(key.removeprefix(PARAM), value) for key, value in row.items() if key.startswith(PARAM)]
    return ", ".join(f"{k}={value_text(v)}" for k, v in pairs if v is not None) or "the base"


def value_text(value: Any) -> str:
    """A key's value, short."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class TrialLines:
    """Prints a trial after the other.

    Args:
        echo: Prints one line.
        metric: Name of the metric.
        cost: What trials are ranked by the cost of, where they are.
    """

    def __init__(self, echo: Callable[[str], None], metric: str, cost: str | None) -> None:
        self._echo, self._metric, self._cost, self._ended = echo, metric, cost, 0

    def __enter__(self) -> TrialLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def show(self, row: Row) -> None:
        """A trial has ended."""
        self._ended += 1
        self._echo(f"trial {self._ended}: {trial_line(row, self._metric, self._cost)}")


class TrialTable:
    """The trials that have ended as a rich renderable, the best one marked.

    Args:
        metric: Name of the metric.
        mode: ``max`` or ``min``.
        cost: What trials are ranked by the cost of, where they are.
        clock: Seconds from any beginning.
    """

    def __init__(
        self, metric: str, mode: str, cost: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metric, self._sign, self._cost = metric, 1 if mode == "max" else -1, cost
        self._clock, self._started = clock, clock()
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        """A trial has ended."""
        self._rows.append(row)

    def render(self, width: int, height: int | None = None, newest: int | None = None) -> Group:
        """The table.

        Args:
            width: Columns of the screen.
            height: Its lines: only the newest trials that fit are shown; ``None`` for all.
            newest: Show so many trials at most.
        """
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in ("trial", self._metric, "epochs", "time s", *([self._cost] if self._cost else [])):
            table.add_column(str(name), justify="right", no_wrap=True)
        table.add_column("ended", no_wrap=True)
        table.add_column("point", no_wrap=height is not None or width < 100, overflow="ellipsis")
        best = self._best()
        numbered = list(enumerate(self._rows, 1))
        most = newest if height is None else max(height - _ROWS_BESIDE, 5)
        shown = numbered[-most:] if most else numbered
        for number, row in shown:
            table.add_row(*self._cells(number, row), style="bold green" if row is best else None)
        elapsed = int(self._clock() - self._started)
        return Group(table, Text(f"{len(self._rows)} trials ended, {elapsed // 60}:{elapsed % 60:02}"))

    def _cells(self, number: int, row: Row) -> list[str]:
        trained = bool(row["epochs"]) and not row["error"]
        spent = (
            [_cost(row, self._cost).removeprefix(f"{self._cost} ") if trained else "-"] if self._cost else []
        )
        return [
            str(number),
            _value(row) if trained else "-",
            str(row["epochs"]),
            f"{row['time_s']:.1f}" if trained else "-",
            *spent,
            row["status"],
            row["error"] or point_text(row),
        ]

    def _best(self) -> Row | None:
        """As it looks so far: complete trials before those stopped early."""
        known = [row for row in self._rows if row["epochs"] and not row["error"] and row["value"] is not None]
        known = [row for row in known if row["status"] == "finished"] or known
        if self._cost:
            known = [row for row in known if row["cost"] is not None]
            return min(known, key=lambda row: row["cost"], default=None)
        return max(known, key=lambda row: self._sign * row["value"], default=None)


def make_trial_view(metric: str, mode: str, cost: str | None, echo: Callable[[str], None]) -> Any:
    """A table where it can be redrawn, lines elsewhere.

    Args:
        metric: Name of the metric.
        mode: ``max`` or ``min``.
        cost: What trials are ranked by the cost of, where they are.
        echo: Prints one line.
    """
    console = Console()
    if console.is_jupyter:
        return NotebookTable(TrialTable(metric, mode, cost))
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalTable(TrialTable(metric, mode, cost), console)
    return TrialLines(echo, metric, cost)
