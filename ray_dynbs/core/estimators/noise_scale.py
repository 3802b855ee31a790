"""The gradient noise scale ``B_simple = tr(Sigma) / |G|^2`` (McCandlish et al. 2018, eq. 2.9), smoothed.

Numerator and denominator are averaged separately and divided last: the average of per-step ratios is
badly biased. Both are per-row quantities, so the averages survive a change of the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ray_dynbs.core.estimators.estimate import Estimate
from ray_dynbs.core.estimators.moving import (
    Average,
    add,
    averages,
    correlation,
    empty,
    most_precise_consistent,
)
from ray_dynbs.core.estimators.pieces import PieceSums
from ray_dynbs.core.keys import Key, check_ranges

State = dict[str, Any]
"""``decays``; ``memories``, a row for each; ``biased`` and ``preconditioned``: of what kind they are."""
MEMORIES_STEPS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
"""Time constants of the memories among which each quantity takes its own."""


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """Exponential averages over steps, de-biased, with a standard error from the steps' own scatter.

    Without a ``decay``, ``|G|^2`` and ``tr(Sigma)`` each take the most precise of several memories that no
    shorter one contradicts: a variance that rises by the step is followed within tens of steps, while a
    gradient buried in noise is averaged over thousands.

    Raises:
        ConfigError: ``decay`` out of range.
    """

    decay: Annotated[
        float | None, Key("weight kept from one measured step to the next; adapts itself if null", ge=0, lt=1)
    ] = None

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def _decays(self) -> list[float]:
        return [1 - 1 / steps for steps in MEMORIES_STEPS] if self.decay is None else [self.decay]

    def init(self) -> State:
        """Nothing measured."""
        return {
            "decays": self._decays,
            "memories": [empty() for _ in self._decays],
            "biased": False,
            "preconditioned": False,
        }

    def update(self, state: Mapping[str, Any], sums: PieceSums | None) -> State:
        """Average in what was measured since the last decision.

        Real pieces replace what came from successive steps, and are not diluted by them. Another metric
        starts anew.

        Args:
            state: From :meth:`init` or the last update.
            sums: Over those steps; ``None`` or non-finite changes nothing.
        """
        if sums is None or not sums.is_finite():
            return dict(state)
        same_metric = sums.preconditioned == state["preconditioned"]
        if state["memories"][0][0] > 0 and same_metric and sums.biased and not state["biased"]:
            return dict(state)
        old = state if same_metric and sums.biased == state["biased"] else self.init()
        moments = sums.means()
        memories = [
            add(row, decay, moments, sums.steps)
            for row, decay in zip(old["memories"], self._decays, strict=True)
        ]
        kind = {"biased": sums.biased, "preconditioned": sums.preconditioned}
        return {"decays": self._decays, "memories": memories, **kind}

    def restored(self, saved: Mapping[str, Any]) -> State:
        """A saved state; a new one where it was saved with other memories."""
        return dict(saved) if saved["decays"] == self._decays else self.init()

    def estimates(self, state: Mapping[str, Any]) -> dict[str, Estimate]:
        """``noise_scale``, ``grad_sq_norm`` and ``grad_variance``; empty before anything was measured.

        Where the average of ``|G|^2`` is not above 0 the noise scale is infinite, with an infinite error.
        The ratio's error is that of the delta method, with the correlation of both from step to step.
        """
        if not state["memories"][0][0] > 0:
            return {}
        both = [averages(row) for row in state["memories"]]
        grad = most_precise_consistent([pair[0] for pair in both])
        variance = most_precise_consistent([pair[1] for pair in both])
        together = correlation(state["memories"][-1])
        biased = bool(state["biased"])
        return {
            "grad_sq_norm": Estimate(grad.value, _relative(grad), biased),
            "grad_variance": Estimate(variance.value, _relative(variance), biased),
            "noise_scale": _ratio(grad, variance, together, biased),
        }


def _relative(average: Average) -> float:
    return average.error / abs(average.value) if average.value else math.inf


def _ratio(grad: Average, variance: Average, together: float, biased: bool) -> Estimate:
    if grad.value <= 0:
        return Estimate(math.inf, math.inf, biased)
    if variance.value <= 0:
        return Estimate(0.0, math.inf, biased)
    g, v = _relative(grad), _relative(variance)
    error = (
        math.inf
        if math.isinf(g) or math.isinf(v)
        else math.sqrt(max(g * g + v * v - 2 * together * g * v, 0.0))
    )
    return Estimate(variance.value / grad.value, error, biased)
