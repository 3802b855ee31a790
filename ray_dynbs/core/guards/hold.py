"""What every guard that vetoes a move does."""

from __future__ import annotations

from ray_dynbs.core.policy import Proposal, View


def hold(proposal: Proposal, view: View, reason: str) -> Proposal:
    """Keep the global batch in use; says so only where a move was proposed. The micro-batch is left alone."""
    if proposal.global_batch_size == view.plan.global_batch_size:
        return proposal
    return proposal.because(f"{reason}: hold", global_batch_size=view.plan.global_batch_size)
