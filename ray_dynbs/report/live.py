"""The table that grows while a run trains: in place on a terminal and in a notebook, lines elsewhere."""

from __future__ import annotations

import io
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ray_dynbs.core.decision import Decision
from ray_dynbs.report.cells import COLUMNS, Restarts, Row, epoch_cells, metric_title, short_reason
from ray_dynbs.report.lines import EpochLines

NOTEBOOK_WIDTH, NOTEBOOK_ROWS = 140, 60
REDRAW_S = 0.5
"""Shortest time between two drawings in a notebook, whose every one is sent as a whole."""
NARROW = 100
_NEEDS_WIDTH = {"micro x k": NARROW, "mem": NARROW, "noise": NARROW, "lr": 70, "samples/s": 70, "loss": 50}
"""Columns left out where a line has fewer characters than that."""
_SMALL_SCREEN_ROWS, _GAP = 5, 2


class View(Protocol):
    """What shows a run while it trains."""

    def __enter__(self) -> Any:
        """Begin."""

    def __exit__(self, *exception: Any) -> None:
        """End; what was shown stays."""

    def show(self, row: Row, notes: tuple[str, ...], decision: Decision | None) -> None:
        """An epoch has ended."""


def make_view(metric: str, epochs: int | None, echo: Callable[[str], None]) -> View:
    """A table where it can be redrawn, lines elsewhere.

    Args:
        metric: Name of the metric that counts.
        epochs: Epochs in the whole run, where known.
        echo: Prints one line.
    """
    console = Console()
    if console.is_jupyter:
        return NotebookTable(RunTable(metric, epochs))
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalTable(RunTable(metric, epochs), console)
    return EpochLines(echo, metric)


class RunTable:
    """The epochs so far as a rich renderable, with progress and the time left.

    Args:
        metric: Name of the metric that counts.
        epochs: Epochs in the whole run, where known.
        clock: Seconds from any beginning.
    """

    def __init__(self, metric: str, epochs: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._metric, self._epochs, self._clock = metric, epochs, clock
        self._rows: list[tuple[dict[str, str], Text]] = []
        self._notes: list[str] = []
        self._restarts = Restarts()
        self._started = self._last = clock()
        self._ends: deque[tuple[float, int]] = deque(maxlen=20)
        self._first_guess = 0.0
        self._done = 0

    def add(self, row: Row, notes: tuple[str, ...], decision: Decision | None) -> None:
        """An epoch has ended."""
        self._notes += self._restarts.notes(row, notes)
        self._first_guess = row["epoch_time_s"]
        self._last, self._done = self._clock(), row["epoch"] + 1
        self._ends.append((self._last, self._done))
        self._rows.append((epoch_cells(row), _coloured(row, decision)))

    def render(self, width: int, height: int | None = None, newest: int | None = None) -> Group:
        """The table.

        Args:
            width: Columns of the screen: a narrow one hides what is least looked at.
            height: Its lines: only the newest epochs that fit are shown; ``None`` for all.
            newest: Show so many epochs at most.
        """
        notes = [Text(f"note: {note}", style="yellow") for note in self._notes[-3:]]
        return Group(self._table(width, height, newest), *notes, self._progress(width))

    def _table(self, width: int, height: int | None, newest: int | None) -> Table:
        hidden = {name for name, needed in _NEEDS_WIDTH.items() if width < needed}
        if not any(cells["noise"] != "-" for cells, _ in self._rows):
            hidden.add("noise")
        shown = self._rows[-newest:] if newest else self._rows
        if height is not None:
            shown = self._rows[-max(height - 10, _SMALL_SCREEN_ROWS) :]
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        titles = {name: name for name in COLUMNS if name not in hidden}
        if "metric" in titles:
            titles["metric"] = metric_title(self._metric)
        room = width
        for name, title in titles.items():
            widest = max([len(title), *(len(cells[name]) for cells, _ in shown)])
            table.add_column(title, justify="right", no_wrap=True, min_width=widest)
            room -= widest + _GAP
        table.add_column("next")
        for cells, decided in shown:
            reason = decided.copy()
            if height is not None or width < NARROW:  # one line each; the rest is in the report
                reason.truncate(max(room, 1), overflow="ellipsis")
            table.add_row(*(cells[name] for name in titles), reason)
        return table

    def _progress(self, width: int) -> Table:
        elapsed = self._clock() - self._started
        line = Table.grid(padding=(0, 1))
        if self._epochs is None:
            line.add_row(Text(f"{self._done} epochs, {_duration(elapsed)}"))
            return line
        text = f"epoch {self._done} of {self._epochs}, {_duration(elapsed)}"
        if not self._rows:
            text += ", workers are starting" if elapsed < 60 else ", first epoch"
        elif self._done < self._epochs:
            (first_end, first), (last_end, last) = self._ends[0], self._ends[-1]
            # The first epoch's end is the first to count from: before it lies the start of the workers.
            each = (last_end - first_end) / (last - first) if last > first else self._first_guess
            left = max(each * (self._epochs - self._done) - (self._clock() - self._last), 0)
            text += f", about {_duration(left)} left" if left >= 1 else ", nearly done"
        bar = ProgressBar(total=self._epochs, completed=self._done, width=min(30, width // 3))
        line.add_row(bar, Text(text))
        return line


class Growing(Protocol):
    """A table that grows while something runs."""

    def add(self, *event: Any) -> None:
        """Something has ended."""

    def render(self, width: int, height: int | None = None, newest: int | None = None) -> Group:
        """The table."""


class TerminalTable:
    """A table redrawn in place.

    Args:
        table: What to draw.
        console: Where.
    """

    def __init__(self, table: Growing, console: Console) -> None:
        self._table, self._console, self._ended = table, console, False
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=2, vertical_overflow="visible"
        )

    def __enter__(self) -> TerminalTable:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended = True
        self._live.stop()

    def show(self, *event: Any) -> None:
        """An epoch, or a trial, has ended."""
        self._table.add(*event)
        self._live.refresh()

    def _render(self) -> Group:
        width, height = self._console.size
        return self._table.render(width, None if self._ended else height)


class NotebookTable:
    """A table redrawn in the output of a notebook's cell.

    Args:
        table: What to draw.
    """

    def __init__(self, table: Growing) -> None:
        self._table = table
        self._handle: Any = None
        self._drawn = 0.0

    def __enter__(self) -> NotebookTable:
        from IPython.display import display

        self._handle = display(self._html(), display_id=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.update(self._html())

    def show(self, *event: Any) -> None:
        """An epoch, or a trial, has ended."""
        self._table.add(*event)
        if time.monotonic() - self._drawn > REDRAW_S:
            self._handle.update(self._html())
            self._drawn = time.monotonic()

    def _html(self) -> Any:
        from IPython.display import HTML

        console = Console(record=True, width=NOTEBOOK_WIDTH, force_jupyter=False, file=io.StringIO())
        console.print(self._table.render(NOTEBOOK_WIDTH, newest=NOTEBOOK_ROWS))
        return HTML(console.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))


def _coloured(row: Row, decision: Decision | None) -> Text:
    text = Text(short_reason(row, decision))
    if decision is None:
        text.stylize("yellow")
    elif decision.plan.global_batch_size != row["global_batch_size"]:
        grew = decision.plan.global_batch_size > row["global_batch_size"]
        text.stylize("bold green" if grew else "bold magenta", 0, text.plain.index(":"))
    return text


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
