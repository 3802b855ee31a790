"""One worker's parts of a run, built from the configuration: model, data, optimizer, loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ray_dynbs.cluster.data import Blocks, fetch
from ray_dynbs.config import Config
from ray_dynbs.core.lr import ScheduleProgress
from ray_dynbs.core.plan import tightest
from ray_dynbs.core.probed import ProbeResult
from ray_dynbs.tasks.loading import load_task
from ray_dynbs.tasks.trial import check_on_rows
from ray_dynbs.training.checkpoint import TrainState, seed_everything
from ray_dynbs.training.columns import ColumnStore, TensorBatch
from ray_dynbs.training.evaluate import Sums, evaluate
from ray_dynbs.training.feed import IndexedFeed, sequential_batches
from ray_dynbs.training.gauge import MemoryGauge
from ray_dynbs.training.loop import TrainingLoop
from ray_dynbs.training.lr import Schedule
from ray_dynbs.training.measuring import takes_memory
from ray_dynbs.training.noise import Measure
from ray_dynbs.training.optimizers import build_optimizer, build_scheduler
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.probe import Probe
from ray_dynbs.training.recompute import checkpoint_activations
from ray_dynbs.training.reports import Progress
from ray_dynbs.training.step import OptimizerStep
from ray_dynbs.training.world import World


@dataclass(frozen=True)
class Parts:
    """What one worker trains with.

    Attributes:
        config: The run's configuration.
        world: The ranks.
        task: The user's task.
        state: Model, optimizer, schedule and precision.
        feed: This rank's training rows.
        validation: The validation rows, or ``None``.
        share: Fraction of the memory that is this rank's own.
        siblings: Models like this one that will train in the same process.
    """

    config: Config
    world: World
    task: Any
    state: TrainState
    feed: IndexedFeed
    validation: ColumnStore | None
    share: float = 1.0
    siblings: int = 0

    def make_step(self) -> OptimizerStep:
        """The optimizer step.

        Raises:
            ConfigError: a model that cannot be trained in parallel micro-batches.
        """
        state, config = self.state, self.config
        return OptimizerStep(
            state.model,
            state.optimizer,
            self.world,
            state.precision,
            clip_grad_norm=config.clip_grad_norm,
            on_nonfinite=config.on_nonfinite,
            preconditioned=config.noise.preconditioned,
        )

    def make_loop(self, step: OptimizerStep, progress: Progress) -> TrainingLoop:
        """The training loop, going on from ``progress``; every rank takes rank 0's weights."""
        state, config = self.state, self.config
        return TrainingLoop(
            model=state.model,
            step=step,
            schedules=[state.schedule],
            feed=self.feed,
            world=self.world,
            seed=config.seed,
            scaling=config.scaling,
            cadence=config.batch.cadence,
            measure_every=config.noise.measure_every,
            lone=config.lone,
            progress=progress,
        )

    def probe_memory(
        self, step: OptimizerStep, *, known: int | None = None, sweep: bool = True
    ) -> ProbeResult:
        """How many rows fit in one forward/backward, tried on all ranks; leaves everything as it is.

        Args:
            step: The optimizer step.
            known: Most rows that earlier incarnations found to fit.
            sweep: Time smaller sizes too, and take one that is surely faster.

        Raises:
            ConfigError: not even one row does.
        """
        config, world = self.config, self.world
        fewest = min(world.size, config.cluster.worker_range[0])  # an elastic run may go on with so few
        start, most = config.probed_sizes(
            num_rows=self.feed.num_rows, world_size=world.size, fewest=fewest, known=known
        )
        self.state.model.train()  # as every epoch begins
        headroom, reason = config.headroom
        gauge = MemoryGauge(world, headroom, self.share)
        probe = Probe(
            self.state.model,
            step,
            self.state.precision,
            world,
            gauge,
            measure=self._kept_noise,
            siblings=self.siblings,
        )
        found = probe.find(self.loss, self.feed.largest, start=start, most=most, sweep=sweep)
        return replace(found, headroom=reason)

    @property
    def _kept_noise(self) -> Measure | None:
        noise = self.config.noise
        return takes_memory(
            noise.measure_every, self.config.lone, self.world.size, preconditioned=noise.preconditioned
        )

    @property
    def memory_key(self) -> str:
        """Names all of the configuration that a probe's answer depends on."""
        parts = {"task", "task_args", "precision", "clip_grad_norm", "optimizer", "data", "memory"}
        chosen = self.config.model_dump(include=parts)
        chosen["optimizer"].pop("lr")
        noise = self._kept_noise, self.config.noise.preconditioned
        return repr([chosen, self.config.batch.max, self.config.headroom, noise])

    def loss(self, batch: TensorBatch) -> tuple[Any, ...]:
        """The task's loss of a micro-batch."""
        pair: tuple[Any, ...] = self.task.loss(self.state.model, batch)
        return pair

    def metrics(self, batch: TensorBatch) -> Sums:
        """The task's metrics of a batch; none where it has no such part."""
        part = getattr(self.task, "metrics", None)
        return part(self.state.model, batch) if part else {}

    def check_metrics(self) -> None:
        """See, on a few validation rows, that metrics are sums and the configured one is among them."""
        if self.validation is not None:
            with self.state.precision.autocast():
                check_on_rows(
                    self.config, self.task, self.state.model, self.validation, device=self.world.device
                )

    def evaluate(self, micro_batch_size: int, most: int | None = None) -> dict[str, float]:
        """Mean loss and metrics over the validation rows; empty without any.

        Args:
            micro_batch_size: Rows in a training forward; evaluation, which keeps no activations, takes
                twice that unless the configuration says otherwise.
            most: Most rows known to fit in a training forward, and so in any.
        """
        if self.validation is None:
            return {}
        batches = sequential_batches(
            self.validation,
            rank=self.world.rank,
            world_size=self.world.size,
            batch_size=self.config.evaluate.batch_size or tightest(2 * micro_batch_size, most) or 1,
            device=self.world.device,
        )
        return evaluate(
            self.state.model,
            batches,
            self.loss,
            self.metrics,
            world=self.world,
            precision=self.state.precision,
        )


Stores = Mapping[str, ColumnStore]
"""Split -> its rows."""


def open_stores(config: Config, blocks: Mapping[str, Blocks]) -> Stores:
    """The rows as this process reads them.

    Raises:
        ConfigError: a column that is missing, or holds nulls or no numbers.
    """
    floats = torch.float64 if config.precision == "fp64" else None
    return {
        split: ColumnStore(fetch(data, config.data.timeout_s), config.data.columns, floats)
        for split, data in blocks.items()
    }


def build_parts(config: Config, world: World, stores: Stores, share: float = 1.0, siblings: int = 0) -> Parts:
    """Build everything a worker trains with.

    Args:
        config: The run's configuration.
        world: The ranks.
        stores: Split -> its rows.
        share: Fraction of the memory that is this rank's own.
        siblings: Models like this one that will train in the same process.

    Raises:
        ConfigError: the data, the model or the optimizer does not fit the configuration.
    """
    task = load_task(config.task)
    precision = MixedPrecision(config.precision, world.device)
    progress = config.schedule_progress(stores["train"].num_rows)
    seed_everything(config.seed, 0, 0)
    model = _place(task.build_model(config), world.device, precision.weight_dtype)
    if config.memory.activation_checkpointing != "off":
        checkpoint_activations(model, config.memory.activation_checkpointing)
    optimizer = _optimizer(config, task, model)
    config.check_optimizers([optimizer])
    schedule = _schedule(config, task, optimizer, progress)
    feed = IndexedFeed(
        stores["train"],
        rank=world.rank,
        plan=config.make_manager(world.size).plan,
        seed=config.seed,
        shuffle=config.data.shuffle,
        device=world.device,
    )
    state = TrainState(model, optimizer, schedule, precision)
    return Parts(config, world, task, state, feed, stores.get("validation"), share)


def _optimizer(config: Config, task: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    build = getattr(task, "build_optimizer", None)
    if build is not None:
        optimizer: torch.optim.Optimizer = build(config, model)
        return optimizer
    section = config.optimizer
    return build_optimizer(section.name, model.parameters(), section.arguments)


def _schedule(
    config: Config, task: Any, optimizer: torch.optim.Optimizer, progress: ScheduleProgress
) -> Schedule:
    section = config.scheduler
    planned = config.epochs * (progress.steps_per_epoch if section.unit == "step" else 1)
    build = getattr(task, "build_scheduler", None)
    if build is not None:
        scheduler = build(config, optimizer, planned)
    else:
        scheduler = build_scheduler(section.name, optimizer, section.arguments, planned)
    has_end = build is not None or "auto" in section.arguments.values()
    per_epoch = section.unit == "epoch"
    return Schedule(scheduler, progress, per_epoch=per_epoch, planned_steps=planned if has_end else None)


def _place(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """The model on its device, real floating numbers in the weights' type; complex ones stay complex."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    placed: torch.nn.Module = model._apply(convert)  # what Module.to does, which would make complex real
    return placed
