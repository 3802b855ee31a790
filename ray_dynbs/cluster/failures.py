"""Which failures are worth another start: a lost worker is, an error in the code is not."""

from __future__ import annotations

from collections.abc import Sequence
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
        if failures and not is_worth_another_start(list(failures.values())):
            return FailureDecision.RAISE
        return super().make_decision(training_failed_error)


def is_worth_another_start(failures: Sequence[BaseException]) -> bool:
    """Whether a process was lost, or all failures are what the loss of one looks like to the others."""
    own = [getattr(failure, "_base_exc", failure) for failure in failures]
    return any(is_lost(each) for each in own) or all(is_consequence(each) for each in own)


def is_lost(failure: BaseException) -> bool:
    """Whether a worker's process is gone, or no longer answers Ray."""
    gone = ray.exceptions.RayActorError | ray.exceptions.NodeDiedError
    return isinstance(failure, gone) or type(failure).__name__ == "WorkerHealthCheckFailedError"
