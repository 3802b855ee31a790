"""An epoch as words: what lines, tables and notebooks show of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_dynbs.core.decision import Decision

Row = Mapping[str, Any]
"""A row of ``epochs.parquet``."""
COLUMNS = ("epoch", "batch", "micro x k", "lr", "loss", "metric", "samples/s", "mem", "noise")


def metric_title(metric: str) -> str:
    """The metric's column."""
    return "val loss" if metric == "loss" else metric


def epoch_cells(row: Row) -> dict[str, str]:
    """Column -> text."""
    return {
        "epoch": str(row["epoch"] + 1),
        "batch": str(row["global_batch_size"]),
        "micro x k": f"{row['micro_batch_size']} x {row['grad_accum_steps']}",
        "lr": f"{row['lr']:.4g}",
        "loss": _number(row["train_loss"], ".4f"),
        "metric": _number(row["val_metric"], ".4f"),
        "samples/s": _number(row["samples_per_s"], ",.0f"),
        "mem": _number(row["memory_fraction"], ".0%"),
        "noise": _number(row["noise_scale"], ".3g"),
    }


def next_size(row: Row, decision: Decision | None) -> str:
    """The size from now on, and what led to it."""
    if decision is None:
        return f"{row['global_batch_size']}: the coordinator did not answer"
    return f"{decision.plan.global_batch_size}: {'; '.join(decision.reasons)}"


def short_reason(row: Row, decision: Decision | None) -> str:
    """The same, the decisive reason first: a guard speaks after the policy that it holds."""
    if decision is None or decision.plan.global_batch_size != row["global_batch_size"]:
        return next_size(row, decision)
    return f"{decision.plan.global_batch_size}: {'; '.join(reversed(decision.reasons))}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class Restarts:
    """Notices where the workers were restarted between two epochs."""

    def __init__(self) -> None:
        self._incarnation: int | None = None

    def notes(self, row: Row, notes: tuple[str, ...]) -> tuple[str, ...]:
        """What there is to say before an epoch: a restart, and the workers' own notes."""
        incarnation, before = row["incarnation"], self._incarnation
        self._incarnation = incarnation
        if before is None or incarnation <= before:
            return notes
        return (f"the workers were restarted; going on with epoch {row['epoch'] + 1}", *notes)
