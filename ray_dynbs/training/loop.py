"""One rank's passes over the data: the feed, the step, the LR and the measurements put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ray_dynbs.core.cadence import Cadence
from ray_dynbs.core.decision import Decision
from ray_dynbs.core.estimators.pieces import Lone
from ray_dynbs.core.lr import Adjustment, Scaling, ramped_scale
from ray_dynbs.training.checkpoint import seed_everything
from ray_dynbs.training.feed import IndexedFeed, StepBatch
from ray_dynbs.training.finite import FiniteWatch
from ray_dynbs.training.lr import Schedule, base_lr
from ray_dynbs.training.measuring import Every, Measuring
from ray_dynbs.training.memory import MemoryWatch
from ray_dynbs.training.reports import EpochReport, Interval, Progress
from ray_dynbs.training.stats import NOTHING, StepStats, Totals
from ray_dynbs.training.step import LossFn, OptimizerStep, StepResult
from ray_dynbs.training.sums import PROBE_ROWS, check_loss_is_sum
from ray_dynbs.training.world import World


class TrainingLoop:
    """Trains pass by pass under the decision last applied.

    ``batches()`` hands out the steps of a pass, ``step()`` takes each, ``finish_epoch()`` closes the pass;
    ``train_epoch()`` is all three.

    Args:
        model: The plain model, on the world's device. Every rank takes rank 0's weights.
        step: The optimizer step over it.
        schedules: The LR schedules.
        feed: This rank's rows.
        world: The ranks.
        seed: Seed of each epoch's random numbers.
        scaling: How the LR follows the batch.
        cadence: When a decision is due within a pass.
        measure_every: Steps from one measurement of gradient noise to the next; ``auto``; ``None``: never.
        lone: What to do on one rank where a step is a lone micro-batch: cut it in two on measured steps (the
            sum is the same but for rounding), compare it with the step before, or do not measure. Where it
            is to be measured, steps of a single row are compared with the step before on any world.
        progress: Where to go on.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        step: OptimizerStep,
        schedules: Sequence[Schedule],
        feed: IndexedFeed,
        world: World,
        seed: int = 0,
        scaling: Scaling | None = None,
        cadence: Cadence | None = None,
        measure_every: Every = None,
        lone: Lone = "none",
        progress: Progress | None = None,
    ) -> None:
        self._model, self._step, self._schedules = model, step, tuple(schedules)
        self._feed, self._world = feed, world
        self._seed, self._scaling = seed, scaling or Scaling()
        self._cadence = cadence or Cadence()
        self._stats, self._decided_upon = StepStats(world.device), NOTHING
        self._memory = MemoryWatch(world.device)
        self._interval_s = 0.0
        self._finite = FiniteWatch(self._stats, step, world.device)
        self._measuring = Measuring(measure_every, world, lone)
        self._lr_scale, self._plan_version = 1.0, 0
        self._last_lr, self._last_scale = base_lr(step.optimizers[0]), 1.0
        self._current: StepBatch | None = None
        self._pass: object = None
        self._drawn = 0
        self._started = self._ended = self._interval_started = time.perf_counter()
        self._is_loss_checked = False
        self._notes: list[str] = []
        self.progress = progress or Progress()
        for tensor in [*model.parameters(), *model.buffers()]:
            world.broadcast_(tensor.data)

    def apply(self, decision: Decision) -> None:
        """Take a decision over: it holds from the very next step."""
        self._feed.set_plan(decision.plan)
        progress = self.progress
        # A start is no change; where it goes on in the middle of a ramp, the progress knows.
        if progress.step == 0:
            progress.ramp_from = decision.lr_scale
        elif decision.signal is not None and decision.lr_scale != self._lr_scale:
            progress.ramp_from, progress.ramp_step = self._ramped(), progress.step
        self._lr_scale, self._plan_version = decision.lr_scale, decision.version

    def take_notes(self) -> list[str]:
        """What there is to say since it was last asked."""
        notes, self._notes = self._notes, []
        return notes

    def refer_to(self, reference_batch_size: int) -> None:
        """Take the base LR for that of another batch, rows."""
        self._scaling = replace(self._scaling, reference_batch_size=reference_batch_size)

    def reseed(self) -> None:
        """Derive the random numbers from here on from the place in the data."""
        progress = self.progress
        seed_everything(self._seed, progress.epoch, self._world.rank, progress.steps_in_epoch)
        self._step.noise.forget()

    def train_epoch(self, loss_fn: LossFn, after_step: Callable[[], None] | None = None) -> EpochReport:
        """Train one pass, all rows once, or what is left of it.

        Args:
            loss_fn: Loss sum and weight of a micro-batch.
            after_step: Called after every step but the last one.

        Raises:
            RuntimeError: the rows drawn are not the rows there are, which is a fault of this library.
        """
        self._model.train()
        for batch in self.batches():
            self.step(batch, loss_fn)
            if after_step is not None and not self.is_complete:
                after_step()
        report = self.finish_epoch()
        if report.rows != self._feed.num_rows:
            raise RuntimeError(f"epoch {report.epoch} drew {report.rows} rows of {self._feed.num_rows}")
        return report

    def batches(self) -> Iterator[StepBatch]:
        """The steps of the pass, or of what is left of it; each is to be given to :meth:`step`.

        Yields:
            This rank's part of each step; on every rank equally many.

        Raises:
            RuntimeError: a batch was not given to ``step``, so that its rows were not used; or another pass
                has begun meanwhile.
        """
        progress = self.progress
        self._started = self._ended = self._interval_started = time.perf_counter()
        this = self._pass = object()
        self.reseed()
        for batch in self._feed.epoch(progress.epoch, progress.rows_in_epoch):
            self._current = batch
            yield batch
            if self._pass is not this:
                raise RuntimeError("another pass has begun; allowed: one iteration over batches() at a time")
            if self._current is not None:
                raise RuntimeError("a batch was not trained on; allowed: step() exactly once for every batch")

    def step(self, batch: StepBatch, loss_fn: LossFn) -> StepResult:
        """Take the optimizer step for a batch just handed out.

        Raises:
            RuntimeError: it is not that batch, or the step was taken already.
            ConfigError: the loss is no sum with its weight (looked at before the very first step).
            FloatingPointError: an earlier step was not finite, so that the weights are spoilt.
        """
        if batch is not self._current:
            raise RuntimeError("allowed: step() once, for the batch that was handed out last")
        self._check_loss(batch, loss_fn)
        progress = self.progress
        seen = progress.epoch + batch.first_row / self._feed.num_rows
        adjustment = self._scaling.at(batch.plan.global_batch_size, self._ramped(), seen)
        self._last_lr = base_lr(self._step.optimizers[0]) * adjustment.lr
        self._last_scale = adjustment.lr
        result = self._run(batch, loss_fn, adjustment)
        self._current, self._ended = None, time.perf_counter()
        self._drawn += batch.drawn
        progress.step += 1
        progress.samples_seen += batch.rows
        progress.skipped_steps += not result.applied
        progress.steps_in_epoch += 1
        progress.rows_in_epoch += batch.rows
        self._stats.add(progress.step, result.grad_norm, result.loss_sum, result.weight)
        if result.pieces is not None:
            self._stats.add_pieces(result.pieces)
        progress.gain += self._scaling.rule.gain(self._lr_scale) if result.applied else 0.0
        for schedule in self._schedules:
            schedule.after_step(
                progress.epoch, progress.rows_in_epoch, applied=result.applied, gain=progress.gain
            )
        self._finite.look(progress.epoch)
        return result

    def _ramped(self) -> float:
        progress = self.progress
        since, length = progress.step - progress.ramp_step, self._scaling.ramp_steps
        return ramped_scale(progress.ramp_from, self._lr_scale, since, length)

    def _run(self, batch: StepBatch, loss_fn: LossFn, adjustment: Adjustment) -> StepResult:
        measuring = self._measuring
        measure = measuring.of_step(self.progress.step, batch.rows, batch.num_micro_batches)
        with (measuring.measured_steps if measure == "pieces" else measuring.plain_steps).timing():
            return self._step.run(
                batch.micro_batches(split=measuring.splits(measure)),
                loss_fn,
                rows=batch.rows,
                adjustment=adjustment,
                measure=measure,
                stopwatch=measuring.own,
            )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Something between two steps that is not training, whose time does not count as such.

        Every rank's buffers are rank 0's in it, and from then on.
        """
        with self.untimed():
            self._synchronise_buffers()
            yield

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """What takes place in it is not training, so that its time does not count as such."""
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # what is under way is training still
        started = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - started
            self._started, self._interval_started = self._started + took, self._interval_started + took

    @property
    def decision_due(self) -> bool:
        """Whether a decision is to be made before the next step; at a pass's end one is made anyway."""
        progress = self.progress
        since = progress.step - progress.decided_step, progress.samples_seen - progress.decided_samples
        return not self.is_complete and self._cadence.due(*since)

    def report_interval(self) -> Interval:
        """What was measured since the last decision; on every rank at the same step."""
        interval, totals = self._interval(time.perf_counter(), ends_pass=False)
        self._decided_upon += totals
        return interval

    def _interval(self, now: float, *, ends_pass: bool) -> tuple[Interval, Totals]:
        totals = self._stats.take()  # waits for the device, so the time is the real one
        progress = self.progress
        self._finite.refuse(totals, progress.epoch)
        steps = progress.step - progress.decided_step
        seconds = now - self._interval_started + self._interval_s
        _, slowest, fullest = self._reduce(0, seconds)
        interval = Interval(
            epoch=progress.epoch,
            epochs_seen=progress.epoch + progress.rows_in_epoch / self._feed.num_rows,
            plan_version=self._plan_version,
            steps=steps,
            rows=progress.samples_seen - progress.decided_samples,
            totals=totals,
            memory_fraction=fullest,
            step_time_s=slowest / max(steps, 1),
            ends_pass=ends_pass,
        )
        progress.decided_step, progress.decided_samples = progress.step, progress.samples_seen
        self._interval_started, self._interval_s = time.perf_counter(), 0.0
        return interval, totals

    @property
    def is_complete(self) -> bool:
        """Whether every row of the pass has been used."""
        return self.progress.rows_in_epoch >= self._feed.num_rows

    def finish_epoch(self) -> EpochReport:
        """Close the pass, whether all its rows were used or not: every rank at the same step.

        Raises:
            FloatingPointError: loss or gradient was not finite, so that the weights are spoilt; names the
                step. Where such steps are left out only if no step of the pass was finite.
        """
        progress, self._current = self.progress, None
        if not self.is_complete:
            for schedule in self._schedules:
                schedule.leave(progress.epoch, progress.rows_in_epoch, progress.gain)
        left_at = None if self.is_complete else self._ended
        interval, totals = self._interval(left_at or time.perf_counter(), ends_pass=True)
        seconds = (left_at or time.perf_counter()) - self._started + progress.time_in_epoch_s
        rows, slowest, fullest = self._reduce(self._drawn, seconds)
        self._synchronise_buffers()
        self._measuring.adapt(progress.steps_in_epoch)
        report = EpochReport(
            epoch=progress.epoch,
            interval=interval,
            steps=progress.steps_in_epoch,
            rows=rows,
            totals=self._decided_upon + totals,
            lr=self._last_lr,
            lr_scale=self._last_scale,
            memory_fraction=fullest,
            epoch_time_s=slowest,
        )
        progress.epoch += 1
        progress.rows_in_epoch = progress.steps_in_epoch = self._drawn = 0
        progress.time_in_epoch_s = 0.0
        self._decided_upon = NOTHING
        return report

    def state_dict(self) -> dict[str, Any]:
        """Position and measurements, JSON-able, between any two steps."""
        progress = self.progress.to_json()
        if self.progress.rows_in_epoch:
            progress["time_in_epoch_s"] += self._ended - self._started
        return {
            "progress": progress,
            "stats": self._stats.state_dict(),
            "decided_upon": self._decided_upon.to_json(),
            "interval_s": self._ended - self._interval_started if self.progress.rows_in_epoch else 0.0,
            "last_lr": self._last_lr,
            "last_scale": self._last_scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.progress = Progress(**state["progress"])
        self._stats.load_state_dict(state["stats"])
        self._decided_upon = Totals.from_json(state["decided_upon"])
        self._interval_s = state["interval_s"]
        self._last_lr, self._last_scale = state["last_lr"], state["last_scale"]
        # Drawn before the restart, by all ranks: counted once.
        self._drawn = self.progress.rows_in_epoch if self._world.rank == 0 else 0
        self._started = self._ended = time.perf_counter()

    def _check_loss(self, batch: StepBatch, loss_fn: LossFn) -> None:
        """Once per process: is the loss a sum?

        On all ranks alike, as soon as each has two rows: a loss may hold a collective of its own.
        """
        most = min(PROBE_ROWS, batch.plan.micro_batch_size)
        if self._is_loss_checked or most < 2 or batch.rows // self._world.size < 2:
            return
        self._is_loss_checked = True
        doubt = check_loss_is_sum(loss_fn, batch.probe(most), self._model, self._step.autocast())
        if doubt is not None:
            self._notes.append(f"whether the loss is a sum could not be told: {doubt}")

    def _reduce(self, rows: int, seconds: float) -> tuple[int, float, float]:
        """Rows over all ranks, slowest time, fullest memory."""
        device = self._world.device
        total = self._world.sum_(torch.tensor([rows], device=device))
        worst = torch.tensor([seconds, self._memory.fraction()], dtype=torch.float64, device=device)
        slowest, fullest = self._world.max_(worst).tolist()
        return int(total.item()), slowest, fullest

    def _synchronise_buffers(self) -> None:
        for buffer in self._model.buffers():
            self._world.broadcast_(buffer.data)
