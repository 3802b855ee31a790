"""The LR scale phased in: from the base LR at a run's beginning, from the old scale after a change."""

from __future__ import annotations


def warmed_scale(scale: float, epochs_seen: float, warmup_epochs: float) -> float:
    """The multiplier in force at a moment of the warm-up (Goyal et al. 2017, section 2.2).

    ``1 + (scale - 1) * min(1, epochs_seen / warmup_epochs)``, with the scale of the moment; without
    warm-up it is ``scale`` itself, bit for bit.

    Args:
        scale: The rule's multiplier, > 0.
        epochs_seen: Passes completed, fractions included, >= 0.
        warmup_epochs: Length of the warm-up in passes, >= 0.

    >>> [round(0.1 * warmed_scale(32, epoch, 5), 10) for epoch in (0, 1, 2.5, 5, 7)]
    [0.1, 0.72, 1.65, 3.2, 3.2]
    """
    if epochs_seen >= warmup_epochs:
        return scale
    return 1.0 + (scale - 1.0) * (epochs_seen / warmup_epochs)


def ramped_scale(old: float, new: float, steps: int, ramp_steps: int) -> float:
    """The multiplier some steps after a change, on a straight line from the old to the new one.

    Args:
        old: Multiplier in force when the change was decided, > 0.
        new: Multiplier decided, > 0.
        steps: Optimizer steps taken since, >= 0.
        ramp_steps: Length of the line in steps, >= 0; 0 is no line.

    >>> [ramped_scale(1.0, 2.0, steps, 4) for steps in (0, 1, 3, 4, 9)]
    [1.25, 1.5, 2.0, 2.0, 2.0]
    """
    if steps + 1 >= ramp_steps:
        return new
    return old + (new - old) * (steps + 1) / ramp_steps
