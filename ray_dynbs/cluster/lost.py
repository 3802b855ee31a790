"""What the loss of one worker looks like to the others."""

from __future__ import annotations

from ray_dynbs.training.sizes import OtherRankFailedError

# When one worker is lost, the others fail because it no longer answers, and may be heard first.
_CONSEQUENCES = ("Connection closed by peer", "gloo", "NCCL", "Connection reset", "Broken pipe")


def is_consequence(error: BaseException) -> bool:
    """Whether a failure only says that another worker failed, or no longer answers, in torch's words."""
    if isinstance(error, OtherRankFailedError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _CONSEQUENCES)
