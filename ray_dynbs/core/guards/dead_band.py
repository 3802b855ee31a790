"""``dead_band``: small moves are not worth making."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ray_dynbs.core.guards.hold import hold
from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.policy import Proposal, State, Stateless, View


@dataclass(frozen=True, kw_only=True)
class DeadBand(Stateless):
    """Hold when the move is smaller than a fraction of the batch in use.

    Raises:
        ConfigError: ``fraction`` outside (0, 1).
    """

    fraction: Annotated[float, Key("smallest relative change worth making", gt=0, lt=1)] = 0.1

    def __post_init__(self) -> None:
        check_ranges(self)

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """Hold inside the band."""
        size = view.plan.global_batch_size
        if abs(proposal.global_batch_size - size) >= self.fraction * size:
            return proposal, state
        reason = f"dead_band: {size} -> {proposal.global_batch_size} is under {self.fraction:.0%}"
        return hold(proposal, view, reason), state
