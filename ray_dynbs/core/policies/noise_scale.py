"""``noise_scale``: the batch follows the gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162).

At ``B = B_simple`` training takes twice the least number of steps and twice the least number of rows
(eq. 2.11): beyond it rows are wasted, below it steps are. For Adam and for language models the noise
scale can lie far below the batch that still pays (Merrill et al. 2025, arXiv 2505.23971): hence the
``multiplier``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.policy import Proposal, State, Stateless, View

SIGNIFICANT = 2.0
"""Standard errors by which target and batch have to differ before the batch moves."""


@dataclass(frozen=True, kw_only=True)
class FollowNoiseScale(Stateless):
    """Move towards ``multiplier`` times the noise scale, once it is known well enough.

    Raises:
        ConfigError: a key out of range.
    """

    multiplier: Annotated[float, Key("batch over noise scale to aim at", gt=0)] = 1.0
    dead_zone: Annotated[float, Key("relative distance to the target that is left alone", ge=0)] = 0.1
    tolerance: Annotated[float, Key("largest relative error of the noise scale to act on", gt=0)] = 0.5
    factor: Annotated[float, Key("largest factor of one move", gt=1, le=1_000)] = 2.0

    def __post_init__(self) -> None:
        check_ranges(self)

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """Move by at most ``factor``, where the distance is more than noise."""
        noise, size = view.estimates.noise_scale, view.plan.global_batch_size
        if noise is None or view.signal.pieces is None:
            return proposal.because(f"noise_scale {view.signal.why_missing('pieces')}: hold"), state
        if not noise.within(self.tolerance) or not noise.value > 0:
            said = f"noise_scale {_shown(noise.value, noise.relative_error)}, {self.tolerance:.0%} allowed"
            return proposal.because(f"{said}: wait"), state
        target = self.multiplier * noise.value
        shown = f"noise_scale {_shown(noise.value, noise.relative_error)}"
        if self.multiplier != 1:
            shown += f" x {self.multiplier:g}"
        if not 0 < target < math.inf:
            return proposal.because(f"{shown}: no size: hold"), state
        distance = abs(math.log(target / size))
        if distance <= math.log1p(self.dead_zone):
            return proposal.because(f"{shown} is near {size}: hold"), state
        if distance <= SIGNIFICANT * noise.relative_error:
            said = f"{shown}, within {SIGNIFICANT:g} errors of {size}: hold"
            return proposal.because(said), state
        moved = size * min(max(target / size, 1 / self.factor), self.factor)
        wanted = max(round(moved), 1)
        return proposal.because(f"{shown}: {size} -> {wanted}", global_batch_size=wanted), state


def _shown(value: float, error: float) -> str:
    return f"{value:.4g} +- {error:.0%}" if math.isfinite(error) else f"{value:.4g}, error unknown"
