"""LR-scaling rules: what the optimizer's settings become as the batch changes.

``ratio`` is always current over reference batch size, k = B/B_ref > 0. Except for AdaScale, which also
looks at the measured noise, the result does not depend on how the batch got there, which is why the LR
cannot drift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_dynbs.core.estimators import Estimates

Betas = tuple[float, float]
ADAM_FAMILY = ("adam", "adamw")


@dataclass(frozen=True)
class Noise:
    """The gradient as AdaScale sees it.

    Attributes:
        variance: ``sigma^2``, variance of the gradient at the reference batch, >= 0.
        sq_norm: ``mu^2 = |G|^2``, >= 0.
        error: Standard error of the latter, >= 0; infinite where nothing is known.
    """

    variance: float
    sq_norm: float
    error: float = 0.0

    @classmethod
    def of(cls, estimates: Estimates, reference_batch_size: int) -> Noise | None:
        """From what was estimated; ``None`` before anything was measured."""
        grad, variance = estimates.grad_sq_norm, estimates.grad_variance
        if grad is None or variance is None:
            return None
        error = abs(grad.value) * grad.relative_error if grad.value else math.inf
        return cls(max(variance.value, 0.0) / reference_batch_size, max(grad.value, 0.0), error)

    def sure_sq_norm(self, ratio: float) -> float:
        """``mu^2`` one standard error to the side on which the LR is the smaller one."""
        return self.sq_norm + self.error if ratio > 1 else max(self.sq_norm - self.error, 0.0)


class LRRule:
    """Base of all rules: nothing changes."""

    def scale(self, ratio: float, noise: Noise | None = None) -> float:
        """Multiplier on the base LR, > 0, for a batch ``ratio`` times the reference."""
        return 1.0

    def explain(self, ratio: float, noise: Noise | None) -> tuple[str, ...]:
        """What there is to say about that multiplier beside the rule's name."""
        return ()

    def betas(self, ratio: float, betas: Betas) -> Betas:
        """Adam's betas for that batch."""
        return betas

    def eps(self, ratio: float, eps: float) -> float:
        """Adam's eps for that batch."""
        return eps

    def warmup(self, ratio: float) -> float:
        """Multiplier on the length of the warm-up in epochs."""
        return 1.0

    def gain(self, scale: float) -> float:
        """Reference steps that a step with this multiplier is worth, > 0."""
        return scale

    @property
    def changes_betas(self) -> bool:
        """Whether it is more than the LR that has to follow."""
        return self.betas(2.0, (0.9, 0.99)) != (0.9, 0.99)

    def largest_ratio(self, betas: Betas) -> float:
        """The ratio below which the rule is defined."""
        return math.inf

    def doubt(self, optimizer: str) -> str | None:
        """Why this rule does not suit an optimizer (``sgd``, ``adam``, ``adamw``), or ``None``."""
        return None


class NoScaling(LRRule):
    """The LR is left alone."""


class Linear(LRRule):
    """LR proportional to the batch (Goyal et al. 2017, arXiv 1706.02677, section 2.1). For SGD."""

    def scale(self, ratio: float, noise: Noise | None = None) -> float:
        """``k``."""
        return ratio

    def doubt(self, optimizer: str) -> str | None:
        """Adam's update is normalised, so its noise grows with the root of the batch."""
        return None if optimizer == "sgd" else f"lr.rule linear is made for sgd; for {optimizer} use sqrt"


class SquareRoot(LRRule):
    """LR proportional to the root of the batch (Krizhevsky 2014, arXiv 1404.5997, section 5). For Adam."""

    def scale(self, ratio: float, noise: Noise | None = None) -> float:
        """``sqrt(k)``."""
        return math.sqrt(ratio)

    def doubt(self, optimizer: str) -> str | None:
        """SGD's step follows the batch linearly."""
        return "lr.rule sqrt is made for adam and adamw; for sgd use linear" if optimizer == "sgd" else None


class AdaScale(LRRule):
    """LR times the gain of the larger batch (Johnson et al. 2020, arXiv 2007.05105, algorithm 2). For SGD."""

    def scale(self, ratio: float, noise: Noise | None = None) -> float:
        """``r = (sigma^2 + mu^2) / (sigma^2 / k + mu^2)``, between 1 and k; without a measurement at most 1.

        It saturates where the gradient outweighs its noise (McCandlish et al. 2018, eq. 2.6). Where ``mu^2``
        is not well known, it is taken one standard error to the side of the smaller LR: the gain grows with
        what is known, instead of jumping as an estimate comes and goes.
        """
        if noise is None:
            return min(ratio, 1.0)
        square = noise.sure_sq_norm(ratio)
        there = noise.variance / ratio + square
        if math.isinf(there) or not there > 0:
            return 1.0
        return (noise.variance + square) / there

    def explain(self, ratio: float, noise: Noise | None) -> tuple[str, ...]:
        """The gain, and how far it is held back by what is not known."""
        if ratio == 1:
            return ()
        if noise is None:
            return ("adascale: no gradient noise measured yet",)
        gain = AdaScale.scale(self, ratio, noise)
        best = AdaScale.scale(self, ratio, Noise(noise.variance, noise.sq_norm))
        doubt = "" if abs(best / gain - 1) < 0.05 else f", {best:.3g} once |G|^2 is known better"
        return (f"adascale: gain {gain:.3g} of {ratio:.3g}{doubt}",)

    def doubt(self, optimizer: str) -> str | None:
        """The gain is that of plain SGD."""
        return (
            None
            if optimizer == "sgd"
            else f"lr.rule adascale is made for sgd; for {optimizer} use adascale_sqrt"
        )


class AdaScaleSquareRoot(AdaScale):
    """The root of AdaScale's gain, for Adam."""

    def scale(self, ratio: float, noise: Noise | None = None) -> float:
        """``sqrt(r)``."""
        return math.sqrt(super().scale(ratio, noise))

    def gain(self, scale: float) -> float:
        """``r``, of which the multiplier is the root."""
        return scale * scale

    def doubt(self, optimizer: str) -> str | None:
        """SGD's step takes the whole gain."""
        return (
            "lr.rule adascale_sqrt is made for adam and adamw; for sgd use adascale"
            if optimizer == "sgd"
            else None
        )


class AdamSDE(SquareRoot):
    """Keeps Adam's stochastic differential equation (Malladi et al. 2022, arXiv 2205.10287, def. 5.1)."""

    def betas(self, ratio: float, betas: Betas) -> Betas:
        """``beta -> 1 - k (1 - beta)`` for both."""
        return 1 - ratio * (1 - betas[0]), 1 - ratio * (1 - betas[1])

    def eps(self, ratio: float, eps: float) -> float:
        """``eps / sqrt(k)``."""
        return eps / math.sqrt(ratio)

    def largest_ratio(self, betas: Betas) -> float:
        """Both betas have to stay above 0."""
        return min((1 / (1 - beta) for beta in betas if beta < 1), default=math.inf)

    def doubt(self, optimizer: str) -> str | None:
        """It is Adam's equation."""
        return (
            "lr.rule adam_sde is made for adam and adamw; for sgd use linear" if optimizer == "sgd" else None
        )


class LEGW(SquareRoot):
    """Square root, with a warm-up of as many steps at any batch (You et al. 2019, arXiv 1901.08256)."""

    def warmup(self, ratio: float) -> float:
        """``k``: linear in epochs."""
        return ratio

    def doubt(self, optimizer: str) -> str | None:
        """Made for both."""
        return None


class HalfLife(SquareRoot):
    """Keeps the half-life of Adam's second moment in rows (Marek et al. 2025, arXiv 2507.07101)."""

    def betas(self, ratio: float, betas: Betas) -> Betas:
        """``beta2 -> beta2^k``; beta1 stays."""
        return betas[0], betas[1] ** ratio

    def doubt(self, optimizer: str) -> str | None:
        """SGD has no second moment."""
        return (
            "lr.rule half_life is made for adam and adamw; for sgd use linear" if optimizer == "sgd" else None
        )


LR_RULES: dict[str, type[LRRule]] = {
    "none": NoScaling,
    "linear": Linear,
    "sqrt": SquareRoot,
    "adascale": AdaScale,
    "adascale_sqrt": AdaScaleSquareRoot,
    "adam_sde": AdamSDE,
    "legw": LEGW,
    "half_life": HalfLife,
}
