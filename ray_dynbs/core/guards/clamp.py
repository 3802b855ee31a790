"""``clamp``: the batch stays within its bounds, and says when that cost something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.policy import Proposal, State, Stateless, View


@dataclass(frozen=True, kw_only=True)
class Clamp(Stateless):
    """Cut the proposal to ``[min, max]``. The manager always ends its chain with the run's bounds.

    Raises:
        ConfigError: a bound below 1, or ``min`` above ``max``.
    """

    min: Annotated[int, Key("smallest global batch size", ge=1)]
    max: Annotated[int, Key("largest global batch size", ge=1)]

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.min > self.max:
            raise ConfigError(f"clamp: min is {self.min} and max is {self.max}; allowed: min at most max")

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """The nearest size within the bounds."""
        wanted = proposal.global_batch_size
        size = max(self.min, min(self.max, wanted))
        if size == wanted:
            return proposal, state
        bound = f"max {self.max}" if size < wanted else f"min {self.min}"
        return proposal.because(f"clamp: {wanted} -> {size} ({bound})", global_batch_size=size), state
