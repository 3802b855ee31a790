"""What a user's loop hands over to a run: model, optimizers, schedulers, rows; and their saved state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray.train
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from ray_dynbs.cluster.data import Blocks, fetch
from ray_dynbs.config.schema import LoopSettings
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.lr import LR_RULES
from ray_dynbs.core.probed import ProbeResult
from ray_dynbs.training.columns import ColumnStore
from ray_dynbs.training.datasets import DatasetStore
from ray_dynbs.training.feed import IndexedFeed, RowStore
from ray_dynbs.training.gauge import MemoryGauge
from ray_dynbs.training.loop import TrainingLoop
from ray_dynbs.training.lr import Schedule
from ray_dynbs.training.measuring import takes_memory
from ray_dynbs.training.plain import plain_model
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.probe import Probe
from ray_dynbs.training.recompute import checkpoint_activations
from ray_dynbs.training.step import LossFn, OptimizerStep
from ray_dynbs.training.world import World

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Schedulers = lr_scheduler.LRScheduler | Sequence[lr_scheduler.LRScheduler] | None


@dataclass(frozen=True)
class Adoption:
    """The parts a run took over.

    Attributes:
        settings: How to decide.
        world: The ranks.
        model: The plain model.
        store: All training rows.
        step: The optimizer step.
        schedules: Of the schedulers stepped once per optimizer step.
        precision: Autocast and loss scaler.
    """

    settings: LoopSettings
    world: World
    model: torch.nn.Module
    store: RowStore
    step: OptimizerStep
    schedules: tuple[Schedule, ...]
    precision: MixedPrecision

    @classmethod
    def of(
        cls,
        settings: LoopSettings,
        world: World,
        *,
        model: torch.nn.Module,
        optimizers: Optimizers,
        schedulers: Schedulers,
        store: RowStore,
    ) -> Adoption:
        """Take over a loop's parts.

        Raises:
            ConfigError: a model that is sharded or whose forward is a collective, parameters of several
                types, or an LR rule that is not defined for every batch with these optimizers.
        """
        plain, precision = plain_model(model), MixedPrecision(settings.precision, world.device)
        if settings.memory.activation_checkpointing != "off":
            checkpoint_activations(plain, settings.memory.activation_checkpointing)
        step = OptimizerStep(
            plain,
            optimizers,
            world,
            precision,
            clip_grad_norm=settings.clip_grad_norm,
            on_nonfinite=settings.on_nonfinite,
            preconditioned=settings.noise.preconditioned,
        )
        settings.check_optimizers(step.optimizers)
        per_pass = settings.schedule_progress(store.num_rows)
        each = schedulers if isinstance(schedulers, Sequence) else [schedulers] if schedulers else []
        schedules = tuple(Schedule(scheduler, per_pass) for scheduler in each)
        return cls(settings, world, plain, store, step, schedules, precision)

    def make_feed(self) -> IndexedFeed:
        """This rank's rows.

        Raises:
            ConfigError: the ranks hold different numbers of rows.
        """
        rows = torch.tensor([self.store.num_rows, -self.store.num_rows], device=self.world.device)
        most, least = self.world.max_(rows).tolist()
        if most != -least:
            raise ConfigError(
                f"the workers' data sets have {-least} to {most} rows; allowed: the whole data set on every "
                "worker, which is dealt out here"
            )
        return IndexedFeed(
            self.store,
            rank=self.world.rank,
            plan=self.settings.make_manager(self.world.size).plan,
            seed=self.settings.seed,
            shuffle=self.settings.shuffle,
            device=self.world.device,
        )

    def make_loop(self, feed: IndexedFeed) -> TrainingLoop:
        """The training loop; every rank takes rank 0's weights."""
        return TrainingLoop(
            model=self.model,
            step=self.step,
            schedules=self.schedules,
            feed=feed,
            world=self.world,
            seed=self.settings.seed,
            scaling=self.settings.scaling,
            cadence=self.settings.batch.cadence,
            measure_every=self.settings.noise.measure_every,
            lone=self.settings.lone,
        )

    def probe_memory(
        self, feed: IndexedFeed, loss_fn: LossFn, *, known: int | None, sweep: bool
    ) -> ProbeResult:
        """How many rows fit in one forward/backward, tried on all ranks; leaves everything as it is.

        Args:
            feed: This rank's rows.
            loss_fn: The loop's.
            known: Most rows that earlier incarnations found to fit.
            sweep: Time smaller sizes too, and take one that is surely faster.

        Raises:
            ConfigError: not even one row does.
        """
        settings, world = self.settings, self.world
        start, most = settings.probed_sizes(num_rows=feed.num_rows, world_size=world.size, known=known)
        headroom, reason = settings.headroom
        gauge = MemoryGauge(world, headroom)
        noise = settings.noise
        measure = takes_memory(
            noise.measure_every, settings.lone, world.size, preconditioned=noise.preconditioned
        )
        probe = Probe(self.model, self.step, self.precision, world, gauge, measure=measure)
        found = probe.find(loss_fn, feed.largest, start=start, most=most, sweep=sweep)
        return replace(found, headroom=reason)

    def doubts(self) -> list[str]:
        """What is worth a note at the start."""
        optimizer = type(self.step.optimizers[0]).__name__.lower()
        doubt = LR_RULES[self.settings.lr.rule]().doubt(optimizer)
        known = optimizer in ("sgd", "adam", "adamw")
        return [*([doubt] if doubt and known else []), *getattr(self.store, "notes", ())]

    def state_dict(self) -> dict[str, Any]:
        """Counts of the schedules (the schedulers' own states are the loop's to save), scaler, data."""
        counts = [schedule.state_dict() for schedule in self.schedules]
        return {
            "data": self._data_identity,
            "schedules": [{key: each[key] for key in each if key != "scheduler"} for each in counts],
            "scaler": self.precision.scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], loop: TrainingLoop, reference: int) -> list[str]:
        """Go on at the place ``loop`` was put to; returns what changed since.

        Args:
            state: Of :meth:`state_dict`.
            loop: Restored already.
            reference: The batch the base LR belonged to in the saved run.

        Raises:
            ConfigError: the state does not fit.
        """
        progress = loop.progress
        notes = self._compare_data(state["data"], progress.rows_in_epoch)
        if len(state["schedules"]) != len(self.schedules):
            raise ConfigError(
                f"the saved run had {len(state['schedules'])} schedulers, prepare() was given "
                f"{len(self.schedules)}; allowed: the same"
            )
        if self.settings.lr.reference_batch_size is not None:
            reference = self.settings.lr.reference_batch_size
        elif self.settings.batch.initial != reference:
            now = self.settings.batch.initial
            notes.append(f"batch.initial is {now} now; the base LR stays that of a batch of {reference}")
        self.settings.check_optimizers(self.step.optimizers, reference)
        loop.refer_to(reference)
        for schedule, counts in zip(self.schedules, state["schedules"], strict=True):
            schedule.plan_by(self.settings.schedule_progress(self.store.num_rows, reference))
            schedule.load_state_dict(
                {**counts, "scheduler": None}, progress.epoch, progress.rows_in_epoch, progress.gain
            )
        if state["scaler"]:
            self.precision.scaler.load_state_dict(state["scaler"])
        return notes

    @property
    def _data_identity(self) -> dict[str, Any]:
        """What the position in a pass refers to."""
        return {
            "num_rows": self.store.num_rows,
            "seed": self.settings.seed,
            "shuffle": self.settings.shuffle,
        }

    def _compare_data(self, saved: Mapping[str, Any], rows_in_epoch: int) -> list[str]:
        """A change of the data is said between passes, and refused within one, whose rows it would mix up.

        Raises:
            ConfigError: it changed, and the checkpoint lies in the middle of a pass.
        """
        notes = []
        for key, now in self._data_identity.items():
            if saved[key] == now:
                continue
            if rows_in_epoch:
                raise ConfigError(
                    f"{key} was {saved[key]}, is {now} now, and the checkpoint lies in the middle of a pass; "
                    "allowed: the same, or a checkpoint from the end of a pass"
                )
            notes.append(f"{key} was {saved[key]} in the checkpoint, is {now} now: the new one is used")
        return notes


def open_rows(data: Any, blocks: Blocks | None, settings: LoopSettings) -> RowStore:
    """The rows to train on: those the loop brings, or the trainer's.

    Raises:
        ConfigError: there are none, or they cannot be picked by number.
    """
    if isinstance(data, DataLoader):
        return DatasetStore.of_loader(data)
    if data is not None:
        return DatasetStore(data)
    if blocks is None:
        raise ConfigError(
            "no training rows; allowed: datasets={'train': ...} for the trainer, or "
            "prepare(..., data=a torch Dataset or DataLoader)"
        )
    return ColumnStore(fetch(blocks, settings.timeout_s), settings.columns)


def restarted_without_state(restored: Mapping[str, Any] | None) -> list[str]:
    """A loop that goes on from its own checkpoint, but not with its run's state."""
    if ray.train.get_checkpoint() is None or restored is not None:
        return []
    return [
        "the loop went on from a checkpoint without run.load_state_dict(): batch size and data begin anew"
    ]
