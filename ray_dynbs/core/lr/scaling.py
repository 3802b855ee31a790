"""What one optimizer step does to the optimizer's settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray_dynbs.core.lr.rules import LRRule, NoScaling
from ray_dynbs.core.lr.warmup import warmed_scale


@dataclass(frozen=True)
class Adjustment:
    """Changes for the length of one step.

    Attributes:
        lr: Multiplier on every group's LR, > 0.
        ratio: Current over reference batch size.
        rule: What betas and eps become.
        weight_decay: Multiplier on every group's weight decay.
    """

    lr: float = 1.0
    ratio: float = 1.0
    rule: LRRule = field(default_factory=NoScaling)
    weight_decay: float = 1.0


@dataclass(frozen=True)
class Scaling:
    """A rule as a run applies it.

    Attributes:
        rule: The rule.
        reference_batch_size: The batch the base LR was tuned for, rows.
        warmup_epochs: Passes over which the multiplier is phased in, at the reference batch.
        ramp_steps: Steps over which a change of the multiplier is phased in, 0 for at once.
        scale_weight_decay: Multiply weight decay by k over the LR's multiplier, ``sqrt(k)`` where that is
            ``sqrt(k)``: it keeps ``B / (LR x decay x rows)`` constant.
    """

    rule: LRRule = field(default_factory=NoScaling)
    reference_batch_size: int = 1
    warmup_epochs: float = 0.0
    ramp_steps: int = 0
    scale_weight_decay: bool = False

    def at(self, batch_size: int, scale: float, epochs_seen: float) -> Adjustment:
        """The changes for a step.

        Args:
            batch_size: Global batch in force, rows.
            scale: The decision's multiplier on the LR.
            epochs_seen: Passes completed, fractions included.
        """
        ratio = batch_size / self.reference_batch_size
        warmed = warmed_scale(scale, epochs_seen, self.warmup_epochs * self.rule.warmup(ratio))
        decay = ratio / scale if self.scale_weight_decay else 1.0
        return Adjustment(warmed, ratio, self.rule, decay)
