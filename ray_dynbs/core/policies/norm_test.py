"""``norm_test``: grow while the gradient is mostly noise (Byrd et al. 2012; Lau et al. 2024, DDP-Norm)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from ray_dynbs.core.estimators import PieceSums
from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.policy import Proposal, State, Stateless, View

MOST = 1 << 53
"""Rows beyond which no answer is given: whole numbers are not exact in floating point from there on."""


def sample_norm_test(variance: float, sq_norm: float, theta: float, batch_size: int) -> int:
    """The batch that passes the test of Byrd et al. 2012 (eq. 3.3, 4.3), never less than the one it is.

    Passes where ``|Var|_1 / b <= theta^2 |g|^2``; else ``b_new = ceil(|Var|_1 / (theta^2 |g|^2))``.

    Args:
        variance: ``|Var|_1``, summed unbiased per-row variance of the gradient.
        sq_norm: ``|g|^2`` of the batch's mean gradient, > 0.
        theta: Relative error allowed, > 0.
        batch_size: ``b``, rows.

    >>> [sample_norm_test(2.5833333, 3.8125, theta, 4) for theta in (0.1, 0.25, 0.5)]
    [68, 11, 4]
    """
    allowed = theta * theta * sq_norm
    if variance / batch_size <= allowed:
        return batch_size
    # A gradient of next to nothing asks for more rows than can be counted.
    return math.ceil(min(variance / allowed, MOST)) if allowed > 0 else MOST


def piece_norm_test(variance: float, sq_norm: float, eta: float, batch_size: int) -> int:
    """The same with ranks or micro-batches as samples (Lau et al. 2024, DDP-Norm).

    For J equal pieces the test's left side ``sum_j |g_j - g|^2 / (J (J - 1))`` is ``tr(Sigma) / B``, and
    ``S = (B/J) sum_j |g_j - g|^2 / (J - 1)`` is ``tr(Sigma)``; in that form unequal pieces fit too.

    Args:
        variance: ``tr(Sigma)`` as :func:`~ray_dynbs.core.estimators.from_pieces` has it.
        sq_norm: ``|g|^2`` of the step's mean gradient, > 0.
        eta: Relative error allowed, > 0.
        batch_size: ``B``, rows.

    >>> [piece_norm_test(20.6666667, 3.8125, eta, 32) for eta in (0.1, 0.25, 0.5)]
    [543, 87, 32]
    """
    return sample_norm_test(variance, sq_norm, eta, batch_size)


@dataclass(frozen=True, kw_only=True)
class NormTest(Stateless):
    """Grow to the size at which the mean gradient passes the test, from averages since the last decision.

    ``|g|^2`` holds ``tr(Sigma) / B`` of noise, so the size settles at ``B_simple (1 / eta^2 - 1)``; with
    ``unbiased`` at ``B_simple / eta^2``. It never shrinks the batch.

    Raises:
        ConfigError: a key out of range.
    """

    eta: Annotated[
        float, Key("standard error over norm of the mean gradient that is allowed", gt=0, lt=1)
    ] = 0.5
    unbiased: Annotated[bool, Key("test against |G|^2 instead of the noisy |g|^2")] = False
    dead_zone: Annotated[float, Key("relative growth that is not worth a change", ge=0)] = 0.05
    tolerance: Annotated[
        float, Key("largest relative error of the squared norm tested against to act on", gt=0)
    ] = 0.5
    factor: Annotated[float, Key("largest factor of one move", gt=1, le=1_000)] = 2.0

    def __post_init__(self) -> None:
        check_ranges(self)

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """Hold where the test passes, or fails by no more than the dead zone."""
        pieces, size = view.signal.pieces, view.plan.global_batch_size
        if pieces is None:
            return proposal.because("norm_test: the pieces' gradients were not measured: hold"), state
        grad_sq, variance = pieces.means()[:2]
        sq_norm = grad_sq if self.unbiased else grad_sq + variance / size
        if variance <= 0 or sq_norm <= 0:
            return proposal.because("norm_test: too few steps to tell gradient from noise: hold"), state
        doubt = _relative_error(pieces, sq_norm)
        if doubt > self.tolerance:
            known = f"{doubt:.0%}" if math.isfinite(doubt) else "no"
            return proposal.because(f"norm_test: |g|^2 known to {known} of itself: wait"), state
        error = math.sqrt(variance / size / sq_norm)
        wanted = piece_norm_test(variance, sq_norm, self.eta, size)
        said = f"norm_test: error {error:.3g} of the gradient, {self.eta:g} allowed"
        if wanted <= size * (1 + self.dead_zone):
            return proposal.because(f"{said}: hold"), state
        moved = max(min(wanted, int(size * self.factor)), size + 1)
        step = f" ({moved} for now)" if moved < wanted else ""
        return proposal.because(f"{said}: {size} -> {wanted}{step}", global_batch_size=moved), state


def _relative_error(pieces: PieceSums, sq_norm: float) -> float:
    """Standard error of the mean ``|G|^2`` of some steps, from their scatter, over a squared norm > 0."""
    if pieces.steps < 2:
        return math.inf
    mean, mean_of_squares = pieces.means()[0], pieces.means()[2]
    scatter = max(mean_of_squares - mean * mean, 0.0)
    return math.sqrt(scatter / (pieces.steps - 1)) / sq_norm
