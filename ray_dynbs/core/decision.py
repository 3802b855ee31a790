"""One decision: what the batch is from now on, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_dynbs.core.keys import typed
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.core.signal import Signal


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What every rank applies at the next step boundary.

    Attributes:
        incarnation: Restarts of the run so far.
        version: Decisions within the run's history; 0 is the plan it began with.
        epoch: The pass at whose end (or in which) it was made, from 0.
        step: Optimizer steps in the run up to it.
        samples_seen: Rows used in the run up to it.
        plan: Sizes from now on.
        micro_ceiling: Most rows learned to fit in one forward/backward; ``None``: no limit was met.
        num_rows: Rows in one pass, above which no batch grows; ``None``: unknown.
        lr_scale: Multiplier on the base LR (before warm-up), > 0.
        reasons: Why, one phrase for each piece that had a say.
        signal: What it was made from; ``None`` for a (re)start.
    """

    incarnation: int
    version: int
    epoch: int
    step: int
    samples_seen: int
    plan: BatchPlan
    lr_scale: float
    micro_ceiling: int | None
    num_rows: int | None
    reasons: tuple[str, ...]
    signal: Signal | None = None

    def to_record(self) -> dict[str, Any]:
        """The journal line of this decision: JSON-able, keys as in ``decisions.jsonl``."""
        return {
            "incarnation": self.incarnation,
            "version": self.version,
            "epoch": self.epoch,
            "step": self.step,
            "samples_seen": self.samples_seen,
            "signal": self.signal.to_json() if self.signal else None,
            "global_batch_size": self.plan.global_batch_size,
            "micro_batch_size": self.plan.micro_batch_size,
            "grad_accum_steps": self.plan.grad_accum_steps,
            "world_size": self.plan.world_size,
            "lr_scale": self.lr_scale,
            "micro_ceiling": self.micro_ceiling,
            "num_rows": self.num_rows,
            "reasons": list(self.reasons),
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Decision:
        """The inverse of :meth:`to_record`.

        Raises:
            KeyError: a field is missing.
            TypeError: a field is of another type.
        """
        record = typed(cls, record)
        sizes = [record[key] for key in ("global_batch_size", "micro_batch_size", "world_size")]
        if any(type(size) is not int for size in sizes):
            raise TypeError(f"sizes are {sizes}")
        return cls(
            incarnation=record["incarnation"],
            version=record["version"],
            epoch=record["epoch"],
            step=record["step"],
            samples_seen=record["samples_seen"],
            plan=BatchPlan(*sizes),
            lr_scale=record["lr_scale"],
            micro_ceiling=record["micro_ceiling"],
            num_rows=record["num_rows"],
            reasons=tuple(record["reasons"]),
            signal=None if record["signal"] is None else Signal.from_json(record["signal"]),
        )
