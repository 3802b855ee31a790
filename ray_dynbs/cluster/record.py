"""What rank 0 tells the coordinator: the signal, and the row of ``epochs.parquet``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_dynbs.core.decision import Decision
from ray_dynbs.core.signal import Signal
from ray_dynbs.training.reports import EpochReport, Interval, Progress


def make_signal(
    interval: Interval,
    progress: Progress,
    validation: Mapping[str, float],
    *,
    metric: str,
    world_size: int,
    micro_ceiling: int | None = None,
) -> Signal:
    """The measurements since the last decision as the manager wants them.

    Args:
        interval: What training measured.
        progress: Where the run is after it.
        validation: Mean loss and metrics; empty where none were measured since the last decision.
        metric: Name of the metric that counts.
        world_size: Number of ranks.
        micro_ceiling: Most rows in one forward/backward, where that was found out since the last decision.
    """
    totals = interval.totals
    return Signal.measured(
        epoch=interval.epoch,
        epochs_seen=interval.epochs_seen,
        step=progress.step,
        samples_seen=progress.samples_seen,
        plan_version=interval.plan_version,
        world_size=world_size,
        num_steps=totals.num_steps,
        num_finite_steps=totals.num_finite_steps,
        rows=interval.rows,
        ends_pass=interval.ends_pass,
        grad_norm=totals.grad_norm,
        train_loss=totals.loss,
        val_loss=validation.get("loss"),
        val_metric=validation.get(metric),
        memory_fraction=interval.memory_fraction,
        step_time_s=interval.step_time_s,
        pieces=totals.pieces,
        micro_ceiling=micro_ceiling,
    )


def make_row(
    report: EpochReport, applied: Decision, validation: Mapping[str, float], *, metric: str
) -> dict[str, Any]:
    """One row of ``epochs.parquet``.

    Args:
        report: What the training pass measured.
        applied: The decision it was trained under.
        validation: Mean loss and metrics; empty without validation rows.
        metric: Name of the metric that counts.
    """
    plan = applied.plan
    return {
        "epoch": report.epoch,
        "incarnation": applied.incarnation,
        "global_batch_size": plan.global_batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "grad_accum_steps": plan.grad_accum_steps,
        "world_size": plan.world_size,
        "steps": report.steps,
        "rows": report.rows,
        "lr": report.lr,
        "lr_scale": report.lr_scale,
        "train_loss": report.totals.loss,
        "val_loss": validation.get("loss"),
        "val_metric": validation.get(metric),
        "grad_norm": report.totals.grad_norm,
        "noise_scale": _noise_scale(report),
        "memory_fraction": report.memory_fraction,
        "samples_per_s": report.rows / report.epoch_time_s,
        "epoch_time_s": report.epoch_time_s,
    }


def make_evaluation(
    progress: Progress, validation: Mapping[str, float], applied: Decision, *, metric: str
) -> dict[str, Any]:
    """One row of ``evaluations.parquet``.

    Args:
        progress: Where the run is.
        validation: Mean loss and metrics.
        applied: The decision in force.
        metric: Name of the metric that counts.
    """
    return {
        "epoch": progress.epoch,
        "incarnation": applied.incarnation,
        "step": progress.step,
        "samples_seen": progress.samples_seen,
        "val_loss": validation.get("loss"),
        "val_metric": validation.get(metric),
    }


def _noise_scale(report: EpochReport) -> float | None:
    """This pass's own, ``tr(Sigma) / |G|^2`` in rows; ``None`` where the gradient is lost in noise."""
    pieces = report.totals.pieces
    if pieces is None or pieces.grad_sq <= 0 or pieces.variance <= 0:
        return None
    return pieces.variance / pieces.grad_sq
