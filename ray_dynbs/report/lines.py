"""One line per epoch, for where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from ray_dynbs.core.decision import Decision
from ray_dynbs.report.cells import Restarts, Row, epoch_cells, metric_title, next_size

_WIDTHS = {
    "epoch": 5,
    "batch": 6,
    "micro x k": 9,
    "lr": 9,
    "loss": 8,
    "metric": 9,
    "samples/s": 10,
    "mem": 4,
}


class EpochLines:
    """Prints an epoch after the other, and says where the workers were restarted in between.

    Args:
        echo: Prints one line.
        metric: Name of the metric that counts.
    """

    def __init__(self, echo: Callable[[str], None], metric: str) -> None:
        self._echo, self._restarts = echo, Restarts()
        titles = {name: name for name in _WIDTHS} | {"metric": metric_title(metric)[:9]}
        self._header = _aligned(titles) + "  next"

    def __enter__(self) -> EpochLines:
        self._echo(self._header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def show(self, row: Row, notes: tuple[str, ...], decision: Decision | None) -> None:
        """Print one epoch, what was decided at its end and why."""
        for note in self._restarts.notes(row, notes):
            self._echo(f"note: {note}")
        self._echo(f"{_aligned(epoch_cells(row))}  {next_size(row, decision)}")


def _aligned(cells: dict[str, str]) -> str:
    return "  ".join(f"{cells[name]:>{width}}" for name, width in _WIDTHS.items())
