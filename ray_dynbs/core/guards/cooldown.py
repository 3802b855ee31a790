"""``cooldown``: after a change, wait before the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ray_dynbs.core.guards.hold import hold
from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.policy import Proposal, State, Stateless, View


@dataclass(frozen=True, kw_only=True)
class Cooldown(Stateless):
    """Hold the batch for a number of decisions after it changed.

    It counts from the change that really took effect: a proposal vetoed by another guard does not
    restart it.

    Raises:
        ConfigError: ``decisions`` below 0.
    """

    decisions: Annotated[int, Key("decisions to hold after a change", ge=0)] = 1

    def __post_init__(self) -> None:
        check_ranges(self)

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """Hold while fewer than ``decisions`` decisions have passed since the change."""
        passed = view.decisions_since_change
        if passed is None or passed >= self.decisions:
            return proposal, state
        return hold(
            proposal, view, f"cooldown: {passed} of {self.decisions} decisions since the last change"
        ), state
