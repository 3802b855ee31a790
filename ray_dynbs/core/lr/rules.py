"""LR-scaling rules: the multiplier on the base LR as a function of the batch ratio.

``ratio`` is always current over reference batch size, k = B/B_ref > 0. The result does not depend
on how the batch got there, which is why the LR cannot drift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class LRRule(Protocol):
    """A pure function of the batch ratio."""

    def scale(self, ratio: float) -> float:
        """Multiplier on the base LR, > 0, for a batch ``ratio`` times the reference."""

    def doubt(self, optimizer: str) -> str | None:
        """Why this rule does not suit an optimizer (``sgd``, ``adam``, ``adamw``), or ``None``."""


@dataclass(frozen=True)
class NoScaling:
    """The LR is left alone."""

    def scale(self, ratio: float) -> float:
        """Always 1."""
        return 1.0

    def doubt(self, optimizer: str) -> str | None:
        """Nothing to say against it."""
        return None


@dataclass(frozen=True)
class Linear:
    """LR proportional to the batch (Goyal et al. 2017, arXiv 1706.02677, section 2.1). For SGD."""

    def scale(self, ratio: float) -> float:
        """``k``."""
        return ratio

    def doubt(self, optimizer: str) -> str | None:
        """Adam's update is normalised, so its noise grows with the root of the batch."""
        return None if optimizer == "sgd" else f"lr.rule linear is made for sgd; for {optimizer} use sqrt"


@dataclass(frozen=True)
class SquareRoot:
    """LR proportional to the root of the batch (Krizhevsky 2014, arXiv 1404.5997, section 5). For Adam."""

    def scale(self, ratio: float) -> float:
        """``sqrt(k)``."""
        return math.sqrt(ratio)

    def doubt(self, optimizer: str) -> str | None:
        """SGD's step follows the batch linearly."""
        return "lr.rule sqrt is made for adam and adamw; for sgd use linear" if optimizer == "sgd" else None


LR_RULES: dict[str, type[LRRule]] = {"none": NoScaling, "linear": Linear, "sqrt": SquareRoot}
