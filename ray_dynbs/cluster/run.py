"""The run as an existing train loop meets it, in every worker: its batches, its step, its state.

The loop stays the user's: model, optimizer, scheduler, validation, ``train.report`` and checkpoints. From
here come the batches, in the size decided, and the step, which splits and reduces them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray.train.torch
import torch

from ray_dynbs.cluster.adoption import Adoption, Optimizers, Schedulers, open_rows, restarted_without_state
from ray_dynbs.cluster.agreement import Agreement
from ray_dynbs.cluster.coordinator import ActorLink
from ray_dynbs.cluster.data import Blocks
from ray_dynbs.config.schema import LoopSettings
from ray_dynbs.core.decision import Decision
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.training.feed import IndexedFeed, StepBatch
from ray_dynbs.training.loop import TrainingLoop
from ray_dynbs.training.probe import unless_it_fails
from ray_dynbs.training.reports import EpochReport
from ray_dynbs.training.step import LossFn, StepResult
from ray_dynbs.training.world import World


@dataclass(frozen=True)
class LoopInput:
    """What the driver hands to every worker.

    Attributes:
        settings: How to decide.
        blocks: The training rows; ``None`` where the loop brings them.
        coordinator: Handle of the actor.
    """

    settings: LoopSettings
    blocks: Blocks | None
    coordinator: Any


class Run:
    """One rank's part of a run inside a user's train loop.

    Args:
        given: The driver's hand-over.
    """

    def __init__(self, given: LoopInput) -> None:
        self._given = given
        self._world = World.current(ray.train.torch.get_device())
        self._parts: Adoption | None = None
        self._begun: tuple[TrainingLoop, Agreement] | None = None
        self._feed: IndexedFeed | None = None
        self._is_probed = False
        self._restored: dict[str, Any] | None = None
        self._pending: tuple[EpochReport, Decision] | None = None
        self._logged: dict[str, float] = {}
        self._fresh: dict[str, float] = {}  # logged since the last decision
        self._pass: object = None
        self._pass_open = self._pass_left = False

    def prepare(
        self, model: torch.nn.Module, optimizer: Optimizers, scheduler: Schedulers = None, *, data: Any = None
    ) -> Run:
        """Take over the step and the data of a loop.

        Args:
            model: The model, on its device; wrapped by ``ray.train.torch.prepare_model`` or not.
            optimizer: Its optimizer, or several that step together.
            scheduler: Schedulers that the loop stepped once per optimizer step: they are stepped here from
                now on, by rows. One that is stepped once per epoch stays with the loop.
            data: A torch data set or DataLoader to train on, the whole of it on every worker; the trainer's
                ``datasets["train"]`` if left out.

        Returns:
            This run.

        Raises:
            ConfigError: a model that is sharded or whose forward is a collective, data that cannot be picked
                by row, parameters of several types.
            RuntimeError: it was called before.
        """
        if self._parts is not None:
            raise RuntimeError(
                "prepare() a second time; allowed: once, with several optimizers as a list and several "
                "models in a torch.nn.ModuleList"
            )
        settings = self._given.settings
        store = open_rows(data, self._given.blocks, settings)
        self._parts = Adoption.of(
            settings, self._world, model=model, optimizers=optimizer, schedulers=scheduler, store=store
        )
        return self

    def batches(self) -> Iterator[StepBatch]:
        """One pass over the training rows, or what a checkpoint in mid-pass has left of it.

        Yields:
            This rank's part of each global batch, to be given to :meth:`step`; on every rank equally many.
            Leaving the loop early is fine where all ranks leave at the same step.
        """
        loop, _ = self._begin()
        self._settle()
        self._pass_open, self._pass_left = True, False
        this = self._pass = object()
        exhausted = False
        try:
            yield from loop.batches()
            exhausted = True
        finally:  # also where the loop breaks out of it
            if self._pass is this:
                self._pass_left = not exhausted
        self._close()

    def step(self, batch: StepBatch, loss_fn: LossFn) -> StepResult:
        """The optimizer step of a batch: forward, backward, reduction, clipping, optimizer, scheduler.

        Args:
            batch: The batch that :meth:`batches` handed out last.
            loss_fn: Micro-batch -> (sum of losses, weight), and a third value to be handed back, if wanted.
                The weight is what a mean would divide by: rows, or tokens. It may be called again for the
                same rows.

        Returns:
            Loss and gradient norm of the whole step over all ranks, on the device.

        Raises:
            RuntimeError: no pass has begun.
        """
        if self._begun is None:
            raise RuntimeError(
                "step() before batches(); allowed: for batch in run.batches(): run.step(batch, ...)"
            )
        loop, agreement = self._begun
        self._probe(batch, loss_fn)
        result = loop.step(batch, loss_fn)
        if loop.decision_due:
            agreement.decide_within(loop.report_interval(), loop.progress, self._fresh)
            self._fresh = {}
        return result

    def log(self, **validation: float) -> None:
        """Hand in what validation gave: ``loss`` and any metric; rank 0's count.

        It reaches the next decision: the one at the pass's end, or within it where ``decide_every`` says so.
        """
        numbers = {name: float(value) for name, value in validation.items()}
        self._logged |= numbers
        self._fresh |= numbers

    @property
    def epoch(self) -> int:
        """The pass to be trained next, from 0; after a resume the one it goes on with."""
        if self._begun is not None:
            progress = self._begun[0].progress
            return progress.epoch + (self._pass_open and progress.steps_in_epoch > 0)
        if self._restored is None:
            return 0
        return int(self._restored["loop"]["progress"]["epoch"]) + bool(self._restored["pass_left"])

    @property
    def plan(self) -> BatchPlan:
        """The sizes in force, from the first pass on."""
        return self._agreement.decision.plan

    @property
    def lr_scale(self) -> float:
        """The multiplier on the optimizer's LR in force, without warm-up."""
        return self._agreement.decision.lr_scale

    @property
    def last_epoch(self) -> EpochReport | None:
        """What the pass just finished did."""
        return self._pending[0] if self._pending else None

    def state_dict(self) -> dict[str, Any]:
        """What belongs into the loop's checkpoint, beside model, optimizer and scheduler: JSON-able.

        It may be taken on one rank alone, between any two steps.
        """
        if self._begun is None or self._parts is None:
            return dict(self._restored or {})
        loop, agreement = self._begun
        pending = self._pending
        return {
            "loop": loop.state_dict(),
            "pass_left": self._pass_left,
            "manager": agreement.state,
            "parts": self._parts.state_dict(),
            "pending": pending and {"report": pending[0].to_json(), "applied": pending[1].to_record()},
            "logged": dict(self._logged),
            "fresh": dict(self._fresh),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; on every rank, before the first :meth:`batches`.

        Raises:
            RuntimeError: training has begun already.
        """
        if self._begun is not None:
            raise RuntimeError("load_state_dict() after the first batch; allowed: before batches()")
        self._restored = dict(state) or None

    def finish(self) -> None:
        """Decide once more at the loop's end; the trainer does it."""
        if self._begun is not None:
            self._settle()

    @property
    def _agreement(self) -> Agreement:
        if self._begun is None:
            raise RuntimeError("the run has not begun; allowed: after the first batches()")
        return self._begun[1]

    def _begin(self) -> tuple[TrainingLoop, Agreement]:
        """On the first pass: every rank takes rank 0's weights, the coordinator starts the group."""
        if self._begun is not None:
            return self._begun
        if self._parts is None:
            raise RuntimeError(
                "batches() before prepare(); allowed: ray_dynbs.prepare(model, optimizer) first"
            )
        self._feed, saved = self._parts.make_feed(), self._restored
        loop = self._parts.make_loop(self._feed)
        metric = self._given.settings.metric.name
        agreement = Agreement(
            ActorLink(self._given.coordinator), self._world, metric=metric, apply=loop.apply
        )
        agreement.notes += [*self._parts.doubts(), *restarted_without_state(saved)]
        if saved is not None:
            loop.load_state_dict(saved["loop"])
            reference = saved["manager"]["reference_batch_size"]
            agreement.notes += self._parts.load_state_dict(saved["parts"], loop, reference)
            self._logged, self._fresh = dict(saved["logged"]), dict(saved["fresh"])
            self._pass_open = bool(saved["pass_left"])
            self._pending = _pending(saved["pending"])
        agreement.start(self._parts.store.num_rows, saved["manager"] if saved else None)
        self._begun = loop, agreement
        return self._begun

    def _probe(self, batch: StepBatch, loss_fn: LossFn) -> None:
        """Before this process's first step: how many rows fit in one forward, now that the loss is known.

        The batch in hand is cut anew where it has to be.
        """
        if self._is_probed or self._parts is None or self._feed is None:
            return
        self._is_probed = True
        if self._given.settings.memory.probe == "off":
            return
        agreement = self._agreement
        known, fresh = agreement.state["micro_ceiling"], self._restored is None
        probe = functools.partial(self._parts.probe_memory, self._feed, loss_fn, known=known, sweep=fresh)
        with self._begin()[0].untimed():
            found, notes = unless_it_fails(probe)
        agreement.notes += notes
        if found is not None and found.ceiling is not None:
            agreement.learn(found.ceiling)
            batch.cut(agreement.decision.plan)

    def _settle(self) -> None:
        """Close a pass that was left early, and make the decision that is due."""
        loop, agreement = self._begin()
        if self._pass_open:
            if loop.progress.steps_in_epoch:
                self._close()
            self._pass_open = self._pass_left = False  # without a step it never began
        if self._pending is None:
            return
        report, applied = self._pending
        agreement.notes += [*loop.take_notes(), *self._unlogged()]
        for schedule in self._parts.schedules if self._parts else ():
            schedule.after_epoch(self._logged.get("loss", report.totals.loss))
        agreement.decide(report, loop.progress, self._logged, applied)
        self._pending, self._logged, self._fresh = None, {}, {}

    def _unlogged(self) -> list[str]:
        metric = self._given.settings.metric.name
        if not self._logged or metric in self._logged:
            return []
        return [f"metric.name is {metric!r}, but run.log() was given {', '.join(sorted(self._logged))}"]

    def _close(self) -> None:
        loop, agreement = self._begin()
        self._pending = loop.finish_epoch(), agreement.decision
        self._pass_open = self._pass_left = False


def _pending(saved: Mapping[str, Any] | None) -> tuple[EpochReport, Decision] | None:
    if saved is None:
        return None
    return EpochReport.from_json(saved["report"]), Decision.from_record(saved["applied"])


_current: list[Run] = []


def current_run() -> Run:
    """The run of this worker.

    Raises:
        RuntimeError: the loop was not started by our trainer.
    """
    if not _current:
        raise RuntimeError("no run in this process; allowed: in a loop started by ray_dynbs.TorchTrainer")
    return _current[-1]


def prepare(
    model: torch.nn.Module, optimizer: Optimizers, scheduler: Schedulers = None, *, data: Any = None
) -> Run:
    """This worker's run, having taken over step and data of its loop: see :meth:`Run.prepare`."""
    return current_run().prepare(model, optimizer, scheduler, data=data)


def in_run(given: LoopInput, loop: Callable[[], Any]) -> Any:
    """Call a user's train loop with a run around it, and return what it returns."""
    run = Run(given)
    _current.append(run)
    try:
        result = loop()
        run.finish()
    finally:
        _current.pop()
    return result
