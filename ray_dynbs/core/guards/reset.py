"""Back to a base size at every pass's end, for those who want each pass to begin the same."""

from __future__ import annotations

from dataclasses import dataclass

from ray_dynbs.core.policy import Proposal, State, Stateless, View


@dataclass(frozen=True, kw_only=True)
class ResetToBase(Stateless):
    """At a pass's end, propose the base size whatever was decided; the micro-batch's limit stays.

    It throws evidence away (AdaptDL, issue 27): the default is to go on from the size reached.

    Attributes:
        size: The base size, rows.
    """

    size: int

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """The base size where a pass is complete."""
        complete = view.signal.epochs_seen == int(view.signal.epochs_seen) and view.signal.epochs_seen > 0
        if not complete or proposal.global_batch_size == self.size:
            return proposal, state
        reason = f"reset: {proposal.global_batch_size} -> {self.size} at the pass's end"
        return proposal.because(reason, global_batch_size=self.size), state
