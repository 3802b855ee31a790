"""Gradient noise from the pieces of a batch: the true gradient's norm and the per-row variance.

McCandlish et al. 2018 (arXiv 1812.06162, eq. 2.8 to 2.12 and appendix A). Notation: B rows in a step, J
pieces of b_j rows with mean gradients g_j, g their row-weighted mean, ``n = |g|^2``,
``Q = sum_j (b_j / B) |g_j|^2``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.keys import typed

Lone = Literal["split", "successive", "none"]
"""What to do with the lone micro-batch of a single rank."""


def from_pieces(
    mean_sq_norm: float, pieces_sq_norm: float, num_pieces: int, batch_size: int
) -> tuple[float, float]:
    """Unbiased ``|G|^2`` and ``tr(Sigma)`` of one step (appendix A.1, for J pieces of any sizes).

    ``|G|^2 = (J n - Q) / (J - 1)``, ``tr(Sigma) = B (Q - n) / (J - 1)``. Either may be negative in one
    step: average over steps, divide last, clip last.

    Args:
        mean_sq_norm: ``n``, squared norm of the row-weighted mean gradient.
        pieces_sq_norm: ``Q``, row-weighted mean of the pieces' squared norms.
        num_pieces: ``J``, at least 2.
        batch_size: ``B``, rows.

    Raises:
        ConfigError: fewer than two pieces.

    >>> [round(value, 7) for value in from_pieces(3.8125, 5.75, 4, 32)]
    [3.1666667, 20.6666667]
    """
    if num_pieces < 2:
        raise ConfigError(f"noise from {num_pieces} pieces; allowed: at least 2")
    g, q, pieces = mean_sq_norm, pieces_sq_norm, num_pieces
    return (pieces * g - q) / (pieces - 1), batch_size * (q - g) / (pieces - 1)


def from_two_sizes(
    big_sq_norm: float, big_size: int, small_sq_norm: float, small_size: int
) -> tuple[float, float]:
    """Unbiased ``|G|^2`` and ``tr(Sigma)`` from gradients of two batch sizes (eq. A.2, A.3).

    Args:
        big_sq_norm: Squared norm of the larger batch's mean gradient.
        big_size: Its rows.
        small_sq_norm: Squared norm of the smaller batch's mean gradient.
        small_size: Its rows, fewer.

    Raises:
        ConfigError: sizes that are not in that order.
    """
    if not 0 < small_size < big_size:
        raise ConfigError(f"two sizes {big_size} and {small_size}; allowed: a larger and a smaller one, > 0")
    grad = (big_size * big_sq_norm - small_size * small_sq_norm) / (big_size - small_size)
    variance = (small_sq_norm - big_sq_norm) / (1 / small_size - 1 / big_size)
    return grad, variance


def trade_off(batch_size: float, critical_batch_size: float) -> tuple[float, float]:
    """Steps and examples needed, over the least possible (eq. 2.11): ``1 + B_crit/B`` and ``1 + B/B_crit``.

    >>> trade_off(250, 1000)
    (5.0, 1.25)
    """
    return 1 + critical_batch_size / batch_size, 1 + batch_size / critical_batch_size


@dataclass(frozen=True)
class PieceSums:
    """Sums over the steps in which pieces were measured since the last decision; they add up.

    Attributes:
        steps: Steps measured.
        grad_sq: Sum of the steps' unbiased ``|G|^2``.
        variance: Sum of the steps' ``tr(Sigma)``.
        grad_sq_2: Sum of squares of the former.
        variance_2: Sum of squares of the latter.
        cross: Sum of products of both.
        biased: Whether successive steps stood in for pieces.
        preconditioned: Whether the norms are those of Adam's metric.
    """

    steps: int
    grad_sq: float
    variance: float
    grad_sq_2: float
    variance_2: float
    cross: float
    biased: bool = False
    preconditioned: bool = False

    @classmethod
    def of_step(cls, grad_sq: float, variance: float, *, biased: bool = False) -> PieceSums:
        """The sums of one step."""
        return cls(1, grad_sq, variance, grad_sq**2, variance**2, grad_sq * variance, biased)

    def __add__(self, other: PieceSums) -> PieceSums:
        """Of both; where they are of two kinds, of the real pieces, or else of the later ones."""
        if (self.biased, self.preconditioned) != (other.biased, other.preconditioned):
            return self if other.biased and not self.biased else other
        return PieceSums(
            self.steps + other.steps,
            self.grad_sq + other.grad_sq,
            self.variance + other.variance,
            self.grad_sq_2 + other.grad_sq_2,
            self.variance_2 + other.variance_2,
            self.cross + other.cross,
            self.biased,
            self.preconditioned,
        )

    def means(self) -> list[float]:
        """Mean per step of each sum, in order."""
        sums = (self.grad_sq, self.variance, self.grad_sq_2, self.variance_2, self.cross)
        return [value / self.steps for value in sums]

    def is_finite(self) -> bool:
        """Whether there is a step, and every sum is a finite number."""
        return self.steps > 0 and all(math.isfinite(value) for value in self.means())

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PieceSums:
        """The inverse of :meth:`to_json`.

        Raises:
            TypeError: an unknown field, or one of another type.
        """
        return cls(**typed(cls, data))
