"""``warmup_hold``: keep the batch as it is early in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ray_dynbs.core.guards.hold import hold
from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.policy import Proposal, State, Stateless, View


@dataclass(frozen=True, kw_only=True)
class WarmupHold(Stateless):
    """Hold the initial batch for the first passes over the data.

    Raises:
        ConfigError: ``epochs`` below 0.
    """

    epochs: Annotated[float, Key("passes to train at the initial batch", ge=0)] = 2

    def __post_init__(self) -> None:
        check_ranges(self)

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """Hold until ``epochs`` passes are complete."""
        seen = view.signal.epochs_seen
        if seen >= self.epochs:
            return proposal, state
        return hold(proposal, view, f"warmup_hold: {seen:g} of {self.epochs:g} epochs"), state
