"""Back to a base size at every pass's end, for those who want each pass to begin the same."""

from __future__ import annotations

from dataclasses import dataclass

from ray_dynbs.core.policy import Proposal, State, Stateless, View


@dataclass(frozen=True, kw_only=True)
class ResetToBase(Stateless):
    """At a pass's end, propose the base size instead of the policy's; guards and micro-batch limits stay.

    It throws evidence away (AdaptDL, issue 27): the default is to go on from the size reached.

    Attributes:
        size: The base size, rows.
        grows: Whether it may raise what was proposed: not where memory may have shrunk it.
    """

    size: int
    grows: bool = True

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """The base size where a pass is complete."""
        wanted = proposal.global_batch_size
        if not view.signal.ends_pass or wanted == self.size:
            return proposal, state
        if wanted < self.size and not self.grows:
            return proposal.because(f"reset: {wanted} kept, since memory may shrink the batch"), state
        reason = f"reset: {wanted} -> {self.size} at the pass's end"
        return proposal.because(reason, global_batch_size=self.size), state
