"""The line printed for every epoch."""

from __future__ import annotations

from collections.abc import Callable

from ray_dynbs.cluster.coordinator import EpochRecord
from ray_dynbs.core.decision import Decision

_WIDTHS = (5, 6, 9, 9, 8, 9, 10, 4)


def header_line(metric: str) -> str:
    """Names of the columns."""
    validation = "val loss" if metric == "loss" else metric
    names = ("epoch", "batch", "micro x k", "lr", "loss", validation[:9], "samples/s", "mem")
    return "  ".join(f"{name:>{width}}" for name, width in zip(names, _WIDTHS, strict=True)) + "  next"


class EpochLines:
    """Prints an epoch after the other, and says where the workers were restarted in between.

    Args:
        echo: Prints one line.
    """

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo
        self._incarnation: int | None = None

    def show(self, record: EpochRecord, decision: Decision | None) -> None:
        """Print one epoch."""
        incarnation = record.row["incarnation"]
        if self._incarnation is not None and incarnation > self._incarnation:
            self._echo(f"note: the workers were restarted; going on with epoch {record.row['epoch'] + 1}")
        self._incarnation = incarnation
        self._echo(epoch_line(record, decision))


def epoch_line(record: EpochRecord, decision: Decision | None) -> str:
    """One epoch, and what was decided at its end and why."""
    row = record.row
    cells = (
        str(row["epoch"] + 1),
        str(row["global_batch_size"]),
        f"{row['micro_batch_size']} x {row['grad_accum_steps']}",
        f"{row['lr']:.4g}",
        f"{row['train_loss']:.4f}",
        "-" if row["val_metric"] is None else f"{row['val_metric']:.4f}",
        f"{row['samples_per_s']:,.0f}",
        f"{row['memory_fraction']:.0%}",
    )
    line = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
    notes = "".join(f"note: {note}\n" for note in record.notes)
    return f"{notes}{line}  {_next(row['global_batch_size'], decision)}"


def _next(size: int, decision: Decision | None) -> str:
    if decision is None:
        return f"{size}: the coordinator did not answer"
    return f"{decision.plan.global_batch_size}: {'; '.join(decision.reasons)}"
