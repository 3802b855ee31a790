"""What the workers measured since the last decision: frozen numbers, safe to log and to replay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ray_dynbs.core.estimators.pieces import PieceSums
from ray_dynbs.core.keys import typed


@dataclass(frozen=True, kw_only=True)
class Signal:
    """The measurements one decision is made from.

    Measured quantities are ``None`` where there is no finite number; ``missing`` says why. Build
    one with :meth:`measured`, which enforces that.

    Attributes:
        epoch: The pass being trained, from 0.
        epochs_seen: Passes completed so far, fractions included.
        step: Optimizer steps in the run so far.
        samples_seen: Rows used in the run so far.
        plan_version: Version of the decision under which this was measured.
        world_size: Ranks that measured.
        num_steps: Optimizer steps since the last decision.
        num_finite_steps: Those of them whose gradient was finite.
        rows: Rows used since the last decision.
        ends_pass: Whether the pass ends here, be it complete or left early.
        grad_norm: Mean L2 norm of the step's mean gradient over the finite steps, before clipping.
        train_loss: Sum of losses over sum of weights since the last decision.
        val_loss: The same over the validation rows.
        val_metric: The configured metric over the validation rows.
        memory_fraction: Memory in use over memory there is, on the worst rank, in [0, 1].
        step_time_s: Mean seconds per optimizer step, on the slowest rank.
        pieces: Sums of gradient noise measured from the pieces of steps, or ``None``.
        micro_ceiling: Most rows found since the last decision to be right for one forward/backward; ``None``
            where nothing was found out.
        missing: Names of measured quantities without a finite number, and the reason.
    """

    epoch: int = 0
    epochs_seen: float = 0.0
    step: int = 0
    samples_seen: int = 0
    plan_version: int = 0
    world_size: int = 1
    num_steps: int = 0
    num_finite_steps: int = 0
    rows: int = 0
    ends_pass: bool = True
    grad_norm: float | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    val_metric: float | None = None
    memory_fraction: float | None = None
    step_time_s: float | None = None
    pieces: PieceSums | None = None
    micro_ceiling: int | None = None
    missing: tuple[tuple[str, str], ...] = ()

    @classmethod
    def measured(cls, **numbers: Any) -> Signal:
        """A signal with every non-finite or impossible measurement replaced by ``None`` and its reason.

        >>> Signal.measured(grad_norm=float("nan")).missing
        (('grad_norm', 'nan'),)
        """
        missing = []
        for name in _MEASURED:
            value = numbers.get(name)
            if value is None:
                continue
            impossible = (value < 0 and name in _NEVER_NEGATIVE) or (value > 1 and name == "memory_fraction")
            if impossible or not math.isfinite(value):
                missing.append((name, str(float(value))))
                numbers[name] = None
        pieces = numbers.get("pieces")
        if pieces is not None and not pieces.is_finite():
            missing.append(("pieces", "not finite"))
            numbers["pieces"] = None
        return cls(**numbers, missing=tuple(missing))

    def why_missing(self, name: str) -> str:
        """The reason a measurement is absent, for a decision's reasons."""
        return dict(self.missing).get(name, "not measured")

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary; ``missing`` becomes an object."""
        return {**asdict(self), "missing": dict(self.missing)}

    @classmethod
    def from_json(cls, data: Any) -> Signal:
        """The inverse of :meth:`to_json`, exact for every float.

        Raises:
            TypeError: an unknown field, or one of another type.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("missing", {}), Mapping):
            raise TypeError(f"signal is {data!r}")
        pieces, missing = data.get("pieces"), data.get("missing", {})
        rest = {key: value for key, value in data.items() if key not in ("pieces", "missing")}
        return cls(
            **typed(cls, rest),
            pieces=None if pieces is None else PieceSums.from_json(pieces),
            missing=tuple(missing.items()),
        )


_NEVER_NEGATIVE = ("grad_norm", "memory_fraction", "step_time_s")
_MEASURED = ("grad_norm", "train_loss", "val_loss", "val_metric", "memory_fraction", "step_time_s")
