"""A number and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """An estimated quantity.

    Attributes:
        value: The quantity.
        relative_error: Its standard error over its value, >= 0; infinite where nothing is known of it.
        biased: Whether it came from a way of measuring that is known to be off.
    """

    value: float
    relative_error: float
    biased: bool = False

    def within(self, tolerance: float) -> bool:
        """Whether the relative error is at most ``tolerance``."""
        return self.relative_error <= tolerance


@dataclass(frozen=True)
class Estimates:
    """All there is at a decision; ``None`` where nothing was measured yet.

    Attributes:
        noise_scale: ``tr(Sigma) / |G|^2``, rows.
        grad_sq_norm: ``|G|^2``, squared norm of the true gradient.
        grad_variance: ``tr(Sigma)``, summed per-row variance of the gradient.
        loss_trend: Change of the loss per pass (of the validation loss, where there is one), over about ten
            decisions.
        memory_trend: Change of the memory fraction per pass, under an unchanged micro-batch.
    """

    noise_scale: Estimate | None = None
    grad_sq_norm: Estimate | None = None
    grad_variance: Estimate | None = None
    loss_trend: Estimate | None = None
    memory_trend: Estimate | None = None
