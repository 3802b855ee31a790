"""``fixed``: the batch size never changes. The baseline every other policy is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from ray_dynbs.core.policy import Proposal, State, Stateless, View


@dataclass(frozen=True, kw_only=True)
class Fixed(Stateless):
    """Keep the batch as it is."""

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """The proposal, unchanged."""
        return proposal.because("fixed"), state
