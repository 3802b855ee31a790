"""The coordinator: one actor that decides for all workers and keeps the run's record.

Every call carries the last agreed manager state, so a decision is a function of its request: a
retried call, or one answered by a restarted actor, gives the same decision again. What the actor
holds between calls is the journal, which it finds in the run directory when it comes back.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_dynbs.cluster.metrics import RunMetrics
from ray_dynbs.config.schema import Batching
from ray_dynbs.core.decision import Decision
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.journal import encode_line
from ray_dynbs.core.signal import Signal
from ray_dynbs.storage.run_directory import DECISIONS, RunDirectory

State = dict[str, Any]
MOST_SHOWN = 8
COORDINATOR_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Reply:
    """A decision, and the manager state after it, to be saved with the next checkpoint."""

    decision: Decision
    state: State


@dataclass(frozen=True)
class EpochRecord:
    """One row of ``epochs.parquet``, and what there is to say about it."""

    row: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DecisionRequest:
    """What rank 0 sends: one message per decision, whatever the number of workers.

    Attributes:
        state: The manager state all ranks last agreed on.
        signal: What was measured since.
        records: Epochs finished since the last message that got through.
    """

    state: State
    signal: Signal
    records: tuple[EpochRecord, ...] = field(default=())


class Coordinator:
    """The manager behind an actor's calls, and the only writer of the run's journal and epochs.

    Args:
        config: How the run decides.
        run: Its directory.
        metrics: Told of every decision and epoch once it is on record, if there are any.
    """

    def __init__(self, config: Batching, run: RunDirectory, metrics: RunMetrics | None = None) -> None:
        self._config, self._run, self._metrics = config, run, metrics
        self._decisions = {(d.incarnation, d.version): d for d in run.read_decisions()}
        self._lines = {key: encode_line(d) + "\n" for key, d in self._decisions.items()}
        self._records = {_key(row): EpochRecord(row) for row in run.read_epochs()}
        self._evaluations = {_place(row): row for row in run.read_evaluations()}
        self._starts: dict[str, int] = {}
        self._show_newest()

    def start(
        self,
        group: str,
        world_size: int,
        num_rows: int,
        state: State | None,
        micro_ceiling: int | None = None,
    ) -> Reply:
        """A group of workers begins, for the first time or after a restart.

        Args:
            group: Names the group, so that a retried call does not count as another restart.
            world_size: Its number of ranks.
            num_rows: Rows in one pass over the training data.
            state: The manager state of the checkpoint it begins from, if there is one.
            micro_ceiling: Most rows that this group found to fit in one forward/backward.
        """
        if group not in self._starts:
            self._starts[group] = 1 + max((i for i, _ in self._decisions), default=-1)
        manager = self._config.make_manager(world_size)
        if state is not None:
            manager.load_state_dict(state)
        ceilings = [d.micro_ceiling for d in self._decisions.values() if d.micro_ceiling is not None]
        decision = manager.start(
            world_size=world_size,
            incarnation=self._starts[group],
            num_rows=num_rows,
            # What was learned about memory outlives a roll-back.
            micro_ceiling=min([*ceilings, *([micro_ceiling] if micro_ceiling else [])], default=None),
        )
        self._record(decision)
        return Reply(decision, _plain(manager.state_dict()))

    def decide(self, request: DecisionRequest) -> Reply:
        """Make and record one decision."""
        manager = self._config.make_manager()
        manager.load_state_dict(request.state)
        size_before = manager.plan.global_batch_size
        decision = manager.decide(request.signal)
        self._record(decision, size_before)
        self._add_epochs(request.records)
        return Reply(decision, _plain(manager.state_dict()))

    def add_evaluation(self, row: dict[str, Any]) -> None:
        """Record one row of ``evaluations.parquet``."""
        self._evaluations[_place(row)] = row
        self._run.write_evaluations(list(self._evaluations.values()))

    def progress(self, after: int) -> list[tuple[EpochRecord, Decision | None]]:
        """The epochs recorded after the first ``after``, each with the decision made at its end."""
        made: dict[tuple[int, int], list[Decision]] = {}
        for decision in self._decisions.values():
            if decision.signal is not None:
                made.setdefault((decision.incarnation, decision.epoch), []).append(decision)
        news = []
        for record in list(self._records.values())[after:]:
            decisions = made.get(_key(record.row), [])
            notes = (*record.notes, *_changes_within(record.row, decisions))
            news.append((replace(record, notes=notes), decisions[-1] if decisions else None))
        return news

    def _record(self, decision: Decision, size_before: int | None = None) -> None:
        key = (decision.incarnation, decision.version)
        new = key not in self._decisions
        self._decisions[key] = decision
        self._lines[key] = encode_line(decision) + "\n"
        self._run.write_text(DECISIONS, "".join(self._lines.values()))
        if self._metrics is not None:
            self._metrics.decided(decision, size_before, counts=new)

    def _add_epochs(self, records: tuple[EpochRecord, ...]) -> None:
        if not records:
            return
        new = {_key(record.row) for record in records} - self._records.keys()
        self._records |= {_key(record.row): record for record in records}
        self._run.write_epochs([record.row for record in self._records.values()])
        if self._metrics is not None:
            for record in records:
                self._metrics.finished(record.row, counts=_key(record.row) in new)

    def _show_newest(self) -> None:
        """Let the metrics go on from what is on record, which an earlier process has counted."""
        if self._metrics is not None:
            for decision in list(self._decisions.values())[-1:]:
                self._metrics.decided(decision, None, counts=False)
            for record in list(self._records.values())[-1:]:
                self._metrics.finished(record.row, counts=False)


def _plain(state: State) -> State:
    """The state as a checkpoint can hold it.

    Raises:
        ConfigError: a policy remembers something that JSON cannot hold.
    """
    try:
        plain: State = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the policy's state {state['policy_state']!r} is not JSON: {error}") from error
    return plain


def _key(row: dict[str, Any]) -> tuple[int, int]:
    return row["incarnation"], row["epoch"]


def _changes_within(row: dict[str, Any], decisions: list[Decision]) -> tuple[str, ...]:
    """A word about the sizes of an epoch before its last one, which is the only one its line shows."""
    sizes = [d.plan.global_batch_size for d in decisions[:-1]]
    if len(set(sizes)) < 2:
        return ()
    walk = [size for size, _ in itertools.groupby(sizes)]
    shown = " -> ".join(map(str, walk)) if len(walk) <= MOST_SHOWN else f"{min(walk)} to {max(walk)}"
    return (f"epoch {row['epoch'] + 1}: {len(sizes)} decisions within it, batch {shown}",)


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return row["incarnation"], row["step"]


class Link(Protocol):
    """The way from rank 0 to a coordinator."""

    def ask(self, method: str, *args: Any) -> Reply | None:
        """A call and its answer; ``None`` where none came in time."""

    def tell(self, method: str, *args: Any) -> None:
        """A call that nobody waits for."""


class ActorLink:
    """To the actor, wherever it is.

    Args:
        actor: Its handle.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def ask(self, method: str, *args: Any) -> Reply | None:
        """A call and its answer; ``None`` where none came in time."""
        if method == "start":  # a retried call is no other restart
            args = (ray.get_runtime_context().get_worker_id(), *args)
        # Silence is said by the caller; a late answer is overwritten by the next one's.
        with contextlib.suppress(ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            reply: Reply = ray.get(getattr(self._actor, method).remote(*args), timeout=COORDINATOR_TIMEOUT_S)
            return reply
        return None

    def tell(self, method: str, *args: Any) -> None:
        """A call that nobody waits for."""
        getattr(self._actor, method).remote(*args)


class LocalLink:
    """To a coordinator in rank 0's own process: a trial of a search, whose driver asks nothing of it.

    Args:
        coordinator: The object itself.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._starts = coordinator, 0

    def ask(self, method: str, *args: Any) -> Reply | None:
        """A call and its answer."""
        if method == "start":
            self._starts += 1
            args = (f"start {self._starts}", *args)
        reply: Reply = getattr(self._coordinator, method)(*args)
        return reply

    def tell(self, method: str, *args: Any) -> None:
        """A call."""
        getattr(self._coordinator, method)(*args)


class CoordinatorActor(Coordinator):
    """A coordinator in a process of its own, where the run's metrics are kept.

    Args:
        config: How the run decides.
        run: Its directory.
        name: What its metrics are tagged with.
    """

    def __init__(self, config: Batching, run: RunDirectory, name: str) -> None:
        metrics = RunMetrics(name)
        super().__init__(config, run, metrics)
        metrics.keep_fresh()


def start_coordinator(config: Batching, run: RunDirectory, name: str | None = None) -> Any:
    """Start the actor next to the driver, which owns it.

    It ends with the driver, survives its own death (calls retry by themselves), takes no CPU and needs no
    name.

    Args:
        config: How the run decides.
        run: Its directory.
        name: What its metrics are tagged with; the directory's name if left out.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(CoordinatorActor)
    return actor.options(scheduling_strategy=here).remote(config, run, name or run.name)
