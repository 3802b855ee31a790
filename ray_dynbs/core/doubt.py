"""What makes measurements doubtful, whatever a policy would make of them."""

from __future__ import annotations

from ray_dynbs.core.estimators import Estimate
from ray_dynbs.core.signal import Signal

MIN_FINITE_FRACTION = 0.5
LEAK_PER_PASS, LEAK_CERTAIN = 0.005, 0.2
"""Rise of the memory fraction that is worth a word, and the relative error above which it is none."""


def too_few(signal: Signal, batch_size: int, num_rows: int | None) -> str | None:
    """Why a signal is of too few rows to decide anything: less than a batch, and not all there are.

    Args:
        signal: With its rows; 0 where they were not counted.
        batch_size: Global batch in force, rows.
        num_rows: Rows in a pass, where known.
    """
    if 0 < signal.rows < batch_size and signal.rows != num_rows:
        return f"{signal.rows} rows since the last decision, {batch_size} in a batch"
    return None


def unreliable(signal: Signal) -> str | None:
    """Why a signal must not grow the batch, whatever a policy made of it."""
    if signal.num_finite_steps < 1:
        return f"no finite step among {signal.num_steps}"
    if signal.num_finite_steps < MIN_FINITE_FRACTION * signal.num_steps:
        return f"only {signal.num_finite_steps} of {signal.num_steps} steps were finite and had weight"
    for name in ("grad_norm", "train_loss", "val_loss"):
        if name in dict(signal.missing):
            return f"{name} is {signal.why_missing(name)}"
    return None


def leak(trend: Estimate | None) -> str | None:
    """What there is to say where memory fills up though nothing was changed."""
    if trend is None or not trend.within(LEAK_CERTAIN) or trend.value < LEAK_PER_PASS:
        return None
    return (
        f"memory rises by {trend.value:.1%} +- {trend.value * trend.relative_error:.1%} a pass under an "
        "unchanged micro-batch"
    )
