"""Where a run is, and what was measured: since the last decision, and over a pass."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ray_dynbs.training.stats import Totals


@dataclass
class Progress:
    """Where a run is: the data position and the counts that outlive a restart.

    Attributes:
        epoch: The pass being trained, or to be trained next, from 0.
        step: Optimizer steps so far, skipped ones included.
        samples_seen: Rows used so far.
        skipped_steps: Those of the steps that were left out because they were not finite.
        rows_in_epoch: Rows of the pass used so far: its position in the data.
        steps_in_epoch: Steps of the pass so far.
        time_in_epoch_s: Time spent on the pass so far.
        decided_step: Steps so far when the last decision was made.
        decided_samples: Rows so far when it was.
        evaluated_step: Steps so far when it was last evaluated.
        evaluated_samples: Rows so far when it was.
        gain: AdaScale's gains of all steps that were applied, summed up.
        ramp_from: The LR multiplier in force when it last changed.
        ramp_step: Steps so far when it did.
    """

    epoch: int = 0
    step: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0
    rows_in_epoch: int = 0
    steps_in_epoch: int = 0
    time_in_epoch_s: float = 0.0
    decided_step: int = 0
    decided_samples: int = 0
    evaluated_step: int = 0
    evaluated_samples: int = 0
    gain: float = 0.0
    ramp_from: float = 1.0
    ramp_step: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class Interval:
    """What was measured since the last decision; the same on every rank.

    Attributes:
        epoch: The pass it ends in, from 0.
        epochs_seen: Passes completed at its end, fractions included.
        plan_version: Version of the decision it was trained under.
        steps: Optimizer steps.
        rows: Rows of those steps.
        totals: Loss, weight, gradient norm and noise sums.
        memory_fraction: Worst rank's, at its end.
        step_time_s: Slowest rank's mean time of a step.
        ends_pass: Whether the pass ends with it.
    """

    epoch: int
    epochs_seen: float
    plan_version: int
    steps: int
    rows: int
    totals: Totals
    memory_fraction: float
    step_time_s: float
    ends_pass: bool = True


@dataclass(frozen=True)
class EpochReport:
    """What one pass did; the same on every rank.

    Attributes:
        epoch: The pass, from 0.
        interval: What was measured since the last decision, which may lie within the pass.
        steps: Optimizer steps.
        rows: Rows really drawn, counted batch by batch and summed over ranks.
        totals: Loss, weight and gradient norm sums.
        lr: The LR of its last step, scale included.
        lr_scale: The multiplier in it, warm-up included.
        memory_fraction: Worst rank's, at the end of the pass.
        epoch_time_s: Slowest rank's time.
    """

    epoch: int
    interval: Interval
    steps: int
    rows: int
    totals: Totals
    lr: float
    lr_scale: float
    memory_fraction: float
    epoch_time_s: float

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EpochReport:
        """The inverse of :meth:`to_json`."""
        interval = {**data["interval"], "totals": Totals.from_json(data["interval"]["totals"])}
        totals = Totals.from_json(data["totals"])
        return cls(**{**data, "interval": Interval(**interval), "totals": totals})
