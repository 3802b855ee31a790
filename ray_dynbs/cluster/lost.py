"""What the loss of one worker looks like to the others."""

from __future__ import annotations

# When one worker is lost, the others fail because it no longer answers, and may be heard first.
_CONSEQUENCES = ("Connection closed by peer", "gloo", "NCCL", "Connection reset", "Broken pipe")


def is_consequence(error: BaseException) -> bool:
    """Whether a failure only says that another worker no longer answers: torch's own kind, in its words."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _CONSEQUENCES)
