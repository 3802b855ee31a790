"""What all ranks of a group hold in common: the decision in force and the manager state behind it.

Rank 0 speaks with the coordinator, once per decision; every rank receives the answer and applies it at
the same step boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ray_dynbs.cluster.coordinator import DecisionRequest, EpochRecord, Link, Reply
from ray_dynbs.cluster.record import make_evaluation, make_row, make_signal
from ray_dynbs.core.decision import Decision
from ray_dynbs.core.plan import BatchPlan, tightest
from ray_dynbs.training.reports import EpochReport, Interval, Progress
from ray_dynbs.training.world import World


class Agreement:
    """One rank's part in starting, deciding and reporting.

    Args:
        coordinator: The way to it, used by rank 0 alone.
        world: The ranks.
        metric: Name of the metric that counts.
        apply: Called on every rank with each decision agreed on.
    """

    def __init__(
        self, coordinator: Link, world: World, *, metric: str, apply: Callable[[Decision], None]
    ) -> None:
        self._coordinator, self._world, self._metric, self._apply = coordinator, world, metric, apply
        self._unsent: list[EpochRecord] = []
        self._learned: int | None = None
        self.decision: Decision
        self.state: dict[str, Any]
        self.notes: list[str] = []

    def start(self, num_rows: int, state: dict[str, Any] | None, micro_ceiling: int | None = None) -> None:
        """Begin, for the first time or after a restart, from the manager state of a checkpoint.

        Args:
            num_rows: Rows in one pass.
            state: The manager's, from the checkpoint.
            micro_ceiling: Most rows found to fit in one forward/backward, if a limit was met.

        Raises:
            RuntimeError: the coordinator did not answer.
        """
        reply = self._ask("start", self._world.size, num_rows, state, micro_ceiling)
        if reply is None:
            raise RuntimeError("the coordinator did not answer")
        self._agree(reply)

    def learn(self, micro_ceiling: int) -> None:
        """Cut every later step into micro-batches of at most so many rows; on every rank at the same step.

        The plan changes at once; the next decision tells the coordinator, and is made knowing it.

        Args:
            micro_ceiling: Most rows in one forward/backward, 1 or more.
        """
        self._learned = tightest(self._learned, micro_ceiling)
        ceiling = tightest(self.state["micro_ceiling"], micro_ceiling)
        plan = self.decision.plan
        cut = BatchPlan.fit(
            plan.global_batch_size, plan.world_size, tightest(plan.micro_batch_size, micro_ceiling)
        )
        self.state = {**self.state, "micro_ceiling": ceiling}
        self.decision = replace(self.decision, plan=cut, micro_ceiling=ceiling)
        self._apply(self.decision)

    def decide(
        self,
        report: EpochReport,
        progress: Progress,
        validation: Mapping[str, float],
        applied: Decision | None = None,
    ) -> None:
        """Rank 0 asks once; all ranks apply the answer, or all keep the plan they have.

        Args:
            report: What the pass measured.
            progress: Where the run is after it.
            validation: Mean loss and metrics; empty without validation rows.
            applied: The decision the pass was trained under, where a restart lies in between.
        """
        row = make_row(report, applied or self.decision, validation, metric=self._metric)
        self._unsent.append(EpochRecord(row, tuple(self.notes)))
        self.notes.clear()
        world_size = (applied or self.decision).plan.world_size
        self._decide(report.interval, progress, validation, world_size)

    def decide_within(self, interval: Interval, progress: Progress, validation: Mapping[str, float]) -> None:
        """The same in the middle of a pass, where there is no epoch to record yet.

        Args:
            interval: What was measured since the last decision.
            progress: Where the run is.
            validation: Mean loss and metrics, where they were measured since the last decision.
        """
        self._decide(interval, progress, validation, self._world.size)

    def evaluated(self, progress: Progress, validation: Mapping[str, float]) -> None:
        """Put an evaluation within a pass on record; nobody waits for it."""
        if self._world.rank == 0 and validation:
            row = make_evaluation(progress, validation, self.decision, metric=self._metric)
            self._coordinator.tell("add_evaluation", row)

    def _decide(
        self, interval: Interval, progress: Progress, validation: Mapping[str, float], world_size: int
    ) -> None:
        signal = make_signal(
            interval,
            progress,
            validation,
            metric=self._metric,
            world_size=world_size,
            micro_ceiling=self._learned,
        )
        reply = self._ask("decide", DecisionRequest(self.state, signal, tuple(self._unsent)))
        if reply is None:
            where = f"step {progress.step} (epoch {interval.epoch})"
            self.notes.append(f"the coordinator did not answer after {where}: the plan was kept")
        else:
            self._unsent.clear()
            self._learned = None
            self._agree(reply)

    def _agree(self, reply: Reply) -> None:
        self.decision, self.state = reply.decision, reply.state
        self._apply(reply.decision)

    def _ask(self, method: str, *args: Any) -> Reply | None:
        """A call that rank 0 makes and whose reply every rank receives; ``None`` without an answer."""
        reply = self._coordinator.ask(method, *args) if self._world.rank == 0 else None
        answer: Reply | None = self._world.broadcast_object(reply)
        return answer
