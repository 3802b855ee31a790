"""One rank's passes over the data: the feed, the step, the LR and the measurements put together."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ray_dynbs.core.decision import Decision
from ray_dynbs.core.lr import warmed_scale
from ray_dynbs.training.checkpoint import seed_everything
from ray_dynbs.training.feed import IndexedFeed, StepPlan
from ray_dynbs.training.lr import Schedule, base_lr
from ray_dynbs.training.memory import memory_fraction
from ray_dynbs.training.stats import StepStats, Totals
from ray_dynbs.training.step import LossFn, OptimizerStep
from ray_dynbs.training.world import World


@dataclass
class Progress:
    """Where a run is: the data position and the counts that outlive a restart.

    Attributes:
        epoch: The pass being trained, or to be trained next, from 0.
        step: Optimizer steps so far, skipped ones included.
        samples_seen: Rows used so far.
        skipped_steps: Those of the steps that the fp16 scaler skipped.
    """

    epoch: int = 0
    step: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class EpochReport:
    """What one pass did; the same on every rank.

    Attributes:
        epoch: The pass, from 0.
        plan_version: Version of the decision it was trained under.
        steps: Optimizer steps.
        rows: Rows really drawn, counted batch by batch and summed over ranks.
        totals: Loss, weight and gradient norm sums.
        lr: The LR of its last step, scale included.
        lr_scale: The multiplier in it, warm-up included.
        memory_fraction: Worst rank's, at the end of the pass.
        epoch_time_s: Slowest rank's time.
    """

    epoch: int
    plan_version: int
    steps: int
    rows: int
    totals: Totals
    lr: float
    lr_scale: float
    memory_fraction: float
    epoch_time_s: float


class TrainingLoop:
    """Trains epoch by epoch under the decision last applied.

    Args:
        model: The plain model, on the world's device.
        optimizer: Its optimizer.
        step: The optimizer step over both.
        schedule: The LR schedule.
        feed: This rank's rows.
        loss_fn: Loss sum and weight of a micro-batch.
        world: The ranks.
        seed: Seed of each epoch's random numbers.
        warmup_epochs: Warm-up of the LR scale, passes.
        progress: Where to go on.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        step: OptimizerStep,
        schedule: Schedule,
        feed: IndexedFeed,
        loss_fn: LossFn,
        world: World,
        seed: int = 0,
        warmup_epochs: float = 0.0,
        progress: Progress | None = None,
    ) -> None:
        self._model, self._optimizer, self._step = model, optimizer, step
        self._schedule, self._feed, self._loss_fn, self._world = schedule, feed, loss_fn, world
        self._seed, self._warmup_epochs = seed, warmup_epochs
        self._stats = StepStats(world.device)
        self._lr_scale, self._plan_version = 1.0, 0
        self._last_lr = self._last_scale = float("nan")
        self.progress = progress or Progress()
        for tensor in [*model.parameters(), *model.buffers()]:
            world.broadcast_(tensor.data)

    def apply(self, decision: Decision) -> None:
        """Take a decision over: it holds from the very next step."""
        self._feed.set_plan(decision.plan)
        self._lr_scale, self._plan_version = decision.lr_scale, decision.version

    def train_epoch(self) -> EpochReport:
        """Train one pass, all rows once.

        Raises:
            FloatingPointError: loss or gradient was not finite, so that the weights are spoilt; names the
                step. Under fp16 only where no step of the pass was finite.
            RuntimeError: the rows drawn are not the rows there are, which is a fault of this library.
        """
        started = time.perf_counter()
        epoch, first_step = self.progress.epoch, self.progress.step
        seed_everything(self._seed, epoch, self._world.rank)
        self._model.train()
        drawn_before = self._feed.rows_drawn
        for step_plan, micro_batches in self._feed.epoch(epoch):
            self._train_step(epoch, step_plan, micro_batches)
        totals = self._stats.take()  # waits for the device, so the time below is the real one
        self._refuse_spoilt_weights(epoch, totals)
        rows, slowest, fullest = self._reduce(
            self._feed.rows_drawn - drawn_before, time.perf_counter() - started
        )
        if rows != self._feed.num_rows:
            raise RuntimeError(f"epoch {epoch} drew {rows} rows of {self._feed.num_rows}")
        self.progress.epoch += 1
        return EpochReport(
            epoch=epoch,
            plan_version=self._plan_version,
            steps=self.progress.step - first_step,
            rows=rows,
            totals=totals,
            lr=self._last_lr,
            lr_scale=self._last_scale,
            memory_fraction=fullest,
            epoch_time_s=slowest,
        )

    def _refuse_spoilt_weights(self, epoch: int, totals: Totals) -> None:
        if totals.first_bad_step is None or (self._step.skips_overflow and totals.num_finite_steps):
            return
        raise FloatingPointError(
            f"loss or gradient was not finite in step {totals.first_bad_step} (epoch {epoch}); "
            "start again with a smaller optimizer.lr, or resume with clip_grad_norm or a lower lr.max_scale"
        )

    def _train_step(self, epoch: int, step_plan: StepPlan, micro_batches: Any) -> None:
        seen = epoch + step_plan.first_row / self._feed.num_rows
        scale = warmed_scale(self._lr_scale, seen, self._warmup_epochs)
        self._last_lr, self._last_scale = base_lr(self._optimizer) * scale, scale
        result = self._step.run(micro_batches, self._loss_fn, rows=step_plan.rows, lr_scale=scale)
        progress = self.progress
        progress.step += 1
        progress.samples_seen += step_plan.rows
        progress.skipped_steps += not result.applied
        self._stats.add(progress.step, result.grad_norm, result.loss_sum, result.weight)
        rows_in_epoch = step_plan.first_row + step_plan.rows
        self._schedule.after_step(epoch, rows_in_epoch, applied=result.applied)

    def _reduce(self, rows: int, seconds: float) -> tuple[int, float, float]:
        """Rows over all ranks, slowest time, fullest memory; running buffers become rank 0's."""
        device = self._world.device
        total = self._world.sum_(torch.tensor([rows], device=device))
        worst = torch.tensor([seconds, memory_fraction(device)], dtype=torch.float64, device=device)
        slowest, fullest = self._world.max_(worst).tolist()
        for buffer in self._model.buffers():
            self._world.broadcast_(buffer.data)
        return int(total.item()), slowest, fullest
