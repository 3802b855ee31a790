"""Which failures are worth another start: a lost worker is, an error in the code is not."""

from __future__ import annotations

from typing import Any

import ray
from ray.train import FailureConfig
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision

from ray_dynbs.cluster.lost import is_consequence

LOST_WORKERS = 3
"""Restarts after lost workers under ``cluster.max_failures: auto``."""


def failure_config(max_failures: int | str) -> FailureConfig:
    """Ray Train's own limit."""
    return FailureConfig(max_failures=LOST_WORKERS if max_failures == "auto" else int(max_failures))


class LostWorkersOnly(DefaultFailurePolicy):
    """Ray Train's policy, but for an error that a worker's code raised: it would only be raised again."""

    def make_decision(self, training_failed_error: Any) -> Any:
        """Give up at once, or let Ray Train count."""
        failures = getattr(training_failed_error, "worker_failures", None)
        if failures and not any(is_lost(failure) for failure in failures.values()):
            return FailureDecision.RAISE
        return super().make_decision(training_failed_error)


def is_lost(failure: BaseException) -> bool:
    """Whether a worker's failure is a lost process, or what the loss of another looks like."""
    own = getattr(failure, "_base_exc", failure)
    if isinstance(own, ray.exceptions.RayActorError | ray.exceptions.NodeDiedError):
        return True
    return is_consequence(own) or "health check" in str(own).lower()
