"""``growth_limit``: no leaps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.policy import Proposal, State, Stateless, View


@dataclass(frozen=True, kw_only=True)
class GrowthLimit(Stateless):
    """Limit growth per decision to a factor of the batch in use. Shrinking is not limited.

    Raises:
        ConfigError: ``factor`` not above 1.
    """

    factor: Annotated[float, Key("largest factor of growth per decision", gt=1, le=1_000)] = 2.0

    def __post_init__(self) -> None:
        check_ranges(self)

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """Cut growth to the factor, by at least one row so that small batches can grow at all."""
        size, wanted = view.plan.global_batch_size, proposal.global_batch_size
        most = max(int(size * self.factor), size + 1)
        if wanted <= most:
            return proposal, state
        reason = f"growth_limit: {wanted} -> {most} (at most x{self.factor:g})"
        return proposal.because(reason, global_batch_size=most), state
