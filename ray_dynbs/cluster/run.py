"""The run as an existing train loop meets it, in every worker: its batches, its step, its state.

The loop stays the user's: model, optimizer, scheduler, validation, ``train.report`` and checkpoints. From
here come the batches, in the size decided, and the step, which splits and reduces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from ray_dynbs.cluster.agreement import Agreement
from ray_dynbs.cluster.data import Blocks, fetch
from ray_dynbs.config.schema import LoopSettings
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.lr import LR_RULES, ScheduleProgress
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.training.columns import ColumnStore
from ray_dynbs.training.datasets import DatasetStore
from ray_dynbs.training.feed import IndexedFeed, RowStore, StepBatch
from ray_dynbs.training.loop import EpochReport, TrainingLoop
from ray_dynbs.training.lr import Schedule
from ray_dynbs.training.plain import plain_model
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.step import LossFn, OptimizerStep, StepResult
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
        self._given, self._settings = given, given.settings
        self._world = World.current(ray.train.torch.get_device())
        self._precision = MixedPrecision(given.settings.precision, self._world.device)
        self._loop: TrainingLoop | None = None
        self._agreement: Agreement | None = None
        self._restored: dict[str, Any] | None = None
        self._pending: EpochReport | None = None
        self._logged: dict[str, float] = {}
        self._pass_open = self._pass_left = False

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: lr_scheduler.LRScheduler | Sequence[lr_scheduler.LRScheduler] | None = None,
        *,
        data: Any = None,
    ) -> Run:
        """Take over the step and the data of a loop.

        Args:
            model: The model, on its device; wrapped by ``ray.train.torch.prepare_model`` or not.
            optimizer: Its optimizer, or several that step together.
            scheduler: Schedulers that the loop stepped once per optimizer step: they are stepped here from
                now on, by rows. One that is stepped once per epoch stays with the loop.
            data: A torch data set or DataLoader to train on; the trainer's ``datasets["train"]`` if left
                out.

        Returns:
            This run.

        Raises:
            ConfigError: a model that is sharded or whose forward is a collective, data that cannot be picked
                by row, parameters of several types.
        """
        self._model = plain_model(model)
        self._store = self._open(data)
        settings = self._settings
        self._step = OptimizerStep(
            self._model,
            optimizer,
            self._world,
            self._precision,
            clip_grad_norm=settings.clip_grad_norm,
            on_nonfinite=settings.on_nonfinite,
        )
        per_pass = ScheduleProgress(self._store.num_rows, settings.reference_batch_size)
        schedulers = scheduler if isinstance(scheduler, Sequence) else [scheduler] if scheduler else []
        self._schedules = [Schedule(each, per_pass) for each in schedulers]
        self._feed = IndexedFeed(
            self._store,
            rank=self._world.rank,
            plan=settings.make_manager(self._world.size).plan,
            seed=settings.seed,
            shuffle=settings.shuffle,
            device=self._world.device,
        )
        return self

    def batches(self) -> Iterator[StepBatch]:
        """One pass over the training rows, or what a checkpoint in mid-pass has left of it.

        Yields:
            This rank's part of each global batch, to be given to :meth:`step`; on every rank equally many.
            Leaving the loop early is fine where all ranks leave at the same step.
        """
        loop = self._begin()
        self._settle()
        self._pass_open, self._pass_left = True, False
        exhausted = False
        try:
            yield from loop.batches()
            exhausted = True
        finally:  # also where the loop breaks out of it
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
        """
        loop: Any = self._loop
        result: StepResult = loop.step(batch, loss_fn)
        return result

    def log(self, **validation: float) -> None:
        """Hand in what validation gave, before the next pass: ``loss`` and any metric; rank 0's count."""
        self._logged |= {name: float(value) for name, value in validation.items()}

    @property
    def epoch(self) -> int:
        """The pass to be trained next, from 0; after a resume the one it goes on with."""
        if self._loop is not None:
            return self._loop.progress.epoch + self._pass_open
        if self._restored is None:
            return 0
        return int(self._restored["loop"]["progress"]["epoch"]) + bool(self._restored["pass_left"])

    @property
    def plan(self) -> BatchPlan:
        """The sizes in force, from the first pass on."""
        return self._began.decision.plan

    @property
    def lr_scale(self) -> float:
        """The multiplier on the optimizer's LR in force, without warm-up."""
        return self._began.decision.lr_scale

    @property
    def last_epoch(self) -> EpochReport | None:
        """What the pass just finished did."""
        return self._pending

    def state_dict(self) -> dict[str, Any]:
        """What belongs into the loop's checkpoint, beside model, optimizer and scheduler: JSON-able.

        It may be taken on one rank alone, between any two steps.
        """
        loop: Any = self._loop
        if loop is None:
            return dict(self._restored or {})
        return {
            "loop": loop.state_dict(),
            "pass_left": self._pass_left,
            "num_rows": self._store.num_rows,
            "manager": self._began.state,
            "schedules": [_counts(schedule) for schedule in self._schedules],
            "scaler": self._precision.scaler.state_dict(),
            "pending": self._pending.to_json() if self._pending else None,
            "logged": dict(self._logged),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; on every rank, before the first :meth:`batches`.

        Raises:
            RuntimeError: training has begun already.
        """
        if self._loop is not None:
            raise RuntimeError("load_state_dict() after the first batch; allowed: before batches()")
        self._restored = dict(state) or None

    def finish(self) -> None:
        """Decide once more at the loop's end; the trainer does it."""
        if self._loop is not None:
            self._settle()

    @property
    def _began(self) -> Agreement:
        if self._agreement is None:
            raise RuntimeError("the run has not begun; allowed: after the first batches()")
        return self._agreement

    def _begin(self) -> TrainingLoop:
        """On the first pass: every rank takes rank 0's weights, the coordinator starts the group."""
        if self._loop is not None:
            return self._loop
        if not hasattr(self, "_step"):
            raise RuntimeError(
                "batches() before prepare(); allowed: ray_dynbs.prepare(model, optimizer) first"
            )
        self._loop = TrainingLoop(
            model=self._model,
            step=self._step,
            schedules=self._schedules,
            feed=self._feed,
            world=self._world,
            seed=self._settings.seed,
            warmup_epochs=self._settings.lr.warmup_epochs,
        )
        agreement = Agreement(
            self._given.coordinator, self._world, metric=self._settings.metric.name, apply=self._loop.apply
        )
        self._agreement = agreement
        agreement.notes += self._doubts()
        if self._restored is not None:
            self._restore(self._loop, self._restored)
        agreement.start(self._store.num_rows, self._restored["manager"] if self._restored else None)
        return self._loop

    def _restore(self, loop: TrainingLoop, state: Mapping[str, Any]) -> None:
        loop.load_state_dict(state["loop"])
        progress = loop.progress
        for schedule, counts in zip(self._schedules, state["schedules"], strict=True):
            schedule.load_state_dict({**counts, "scheduler": None}, progress.epoch, progress.rows_in_epoch)
        if state["scaler"]:
            self._precision.scaler.load_state_dict(state["scaler"])
        self._pending = EpochReport.from_json(state["pending"]) if state["pending"] else None
        self._logged = dict(state["logged"])
        self._pass_open = bool(state["pass_left"])

    def _doubts(self) -> list[str]:
        found = []
        optimizer = type(self._step.optimizers[0]).__name__.lower()
        doubt = LR_RULES[self._settings.lr.rule]().doubt(optimizer)
        if doubt and optimizer in ("sgd", "adam", "adamw"):
            found.append(doubt)
        if ray.train.get_checkpoint() is not None and self._restored is None:
            found.append(
                "the loop went on from a checkpoint without run.load_state_dict(): batch size and data begin "
                "anew"
            )
        return found

    def _settle(self) -> None:
        """Close a pass that was left early, and make the decision that is due."""
        if self._pass_open:
            self._close()
        if self._pending is not None:
            loop: Any = self._loop
            self._began.decide(self._pending, loop.progress, self._logged)
            self._pending, self._logged = None, {}

    def _close(self) -> None:
        loop: Any = self._loop
        self._pending = loop.finish_epoch()
        self._pass_open = self._pass_left = False

    def _open(self, data: Any) -> RowStore:
        """The rows to train on.

        Raises:
            ConfigError: there are none, or they cannot be picked by number.
        """
        if isinstance(data, DataLoader):
            return DatasetStore.of_loader(data)
        if data is not None:
            return DatasetStore(data)
        if self._given.blocks is None:
            raise ConfigError(
                "no training rows; allowed: datasets={'train': ...} for the trainer, or "
                "prepare(..., data=a torch Dataset or DataLoader)"
            )
        return ColumnStore(fetch(self._given.blocks, self._settings.timeout_s), self._settings.columns)


def _counts(schedule: Schedule) -> dict[str, Any]:
    """A schedule's counts; the scheduler's own state is the loop's to save."""
    return {key: value for key, value in schedule.state_dict().items() if key != "scheduler"}


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
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scheduler: lr_scheduler.LRScheduler | Sequence[lr_scheduler.LRScheduler] | None = None,
    *,
    data: Any = None,
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
