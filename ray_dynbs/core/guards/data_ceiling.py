"""``data_ceiling``: no batch above a fraction of the data (Smith et al. 2018 keep it below a tenth)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.policy import Proposal, State, Stateless, View


@dataclass(frozen=True, kw_only=True)
class DataCeiling(Stateless):
    """Cut the proposal to ``fraction`` of the rows in a pass. A batch above it is brought down.

    Raises:
        ConfigError: ``fraction`` out of range.
    """

    fraction: Annotated[float, Key("largest batch over rows in a pass", gt=0, le=1)] = 0.1

    def __post_init__(self) -> None:
        check_ranges(self)

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """Cut where the number of rows is known."""
        if view.num_rows is None:
            return proposal, state
        most = max(int(self.fraction * view.num_rows), 1)
        wanted = proposal.global_batch_size
        if wanted <= most:
            return proposal, state
        reason = f"data_ceiling: {wanted} -> {most} ({self.fraction:g} of {view.num_rows} rows)"
        return proposal.because(reason, global_batch_size=most), state
