"""The closed loop without training: a manager on a world whose noise, speed and memory are given.

To design policies and to throw out hopeless candidates before a search. It says nothing about accuracy:
progress is counted in reference rows, by the efficiency that the noise scale implies (Pollux, OSDI 2021,
eq. 4), and the loss is a curve over that progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from ray_dynbs.core.cadence import Cadence
from ray_dynbs.core.estimators import PieceSums
from ray_dynbs.core.estimators.step_time import StepTimeModel, efficiency
from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.manager import DynamicBatchSizeManager
from ray_dynbs.core.plan import num_steps
from ray_dynbs.core.signal import Signal

MOST_DRAWN = 200
"""Steps per pass whose measurements are drawn one by one; the sums are scaled to all."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What training would have met.

    Raises:
        ConfigError: a number out of range.
    """

    num_rows: Annotated[int, Key("rows in a pass", ge=1, le=1e12)] = 50_000
    noise_scale_start: Annotated[float, Key("noise scale at the beginning, rows", ge=1e-9, le=1e15)] = 100.0
    noise_scale_end: Annotated[
        float, Key("noise scale after `epochs` passes at full efficiency", ge=1e-9, le=1e15)
    ] = 5_000.0
    grad_norm_start: Annotated[
        float, Key("norm of the true gradient at the beginning", ge=1e-30, le=1e30)
    ] = 3.0
    grad_norm_end: Annotated[float, Key("norm of the true gradient at that end", ge=1e-30, le=1e30)] = 0.3
    loss_start: Annotated[float, Key("loss at the beginning", ge=-1e30, le=1e30)] = 2.3
    loss_end: Annotated[float, Key("loss at that end", ge=-1e30, le=1e30)] = 0.1
    epochs: Annotated[float, Key("passes that this world is described over", gt=0)] = 20.0
    dimensions: Annotated[int, Key("independent directions of the gradient's noise", ge=1, le=1e9)] = 200
    memory_base: Annotated[float, Key("memory fraction without any row", ge=0, le=1)] = 0.2
    memory_per_row: Annotated[float, Key("memory fraction of one row of a micro-batch", ge=0, le=1)] = 0.001
    step_time: StepTimeModel = field(default_factory=lambda: StepTimeModel(alpha_c=0.02, beta_c=0.0005))

    def __post_init__(self) -> None:
        check_ranges(self)

    def noise_scale(self, progress: float) -> float:
        """After so much progress, in passes at full efficiency: exponential between start and end."""
        return _between(self.noise_scale_start, self.noise_scale_end, progress / self.epochs)

    def grad_norm(self, progress: float) -> float:
        """Norm of the true gradient, likewise."""
        return _between(self.grad_norm_start, self.grad_norm_end, progress / self.epochs)

    def loss(self, progress: float) -> float:
        """Falls exponentially towards its end."""
        left = math.exp(-3 * progress / self.epochs)
        return self.loss_end + (self.loss_start - self.loss_end) * left


def _between(start: float, end: float, place: float) -> float:
    return float(start * (end / start) ** min(max(place, 0.0), 1.0))


@dataclass(frozen=True)
class SimulatedEpoch:
    """One pass as it would have gone.

    Attributes:
        epoch: From 0.
        global_batch_size: Rows per step, at its end.
        steps: Optimizer steps.
        lr_scale: Multiplier on the LR.
        noise_scale: The world's own.
        progress: Passes at full efficiency that all passes so far were worth.
        loss: At its end.
        time_s: Time of all passes so far.
        reasons: Of the decision at its end.
    """

    epoch: int
    global_batch_size: int
    steps: int
    lr_scale: float
    noise_scale: float
    progress: float
    loss: float
    time_s: float
    reasons: tuple[str, ...]


def simulate(
    make_manager: Callable[[int], DynamicBatchSizeManager],
    world: World,
    *,
    epochs: int,
    world_size: int = 1,
    reference_batch_size: int = 32,
    cadence: Cadence | None = None,
    measured_alone: bool = True,
    seed: int = 0,
) -> list[SimulatedEpoch]:
    """Run a manager through a world.

    Args:
        make_manager: Number of ranks -> the manager.
        world: What it meets.
        epochs: Passes.
        world_size: Ranks.
        reference_batch_size: The batch at which a row is worth a row.
        cadence: When a decision is made within a pass; one is at every pass's end.
        measured_alone: Whether noise is measured where a step is one micro-batch on one rank.
        seed: Of the measurements' noise.
    """
    manager = make_manager(world_size)
    manager.start(world_size=world_size, num_rows=world.num_rows)
    rng = np.random.default_rng(seed)
    run = _Run(manager, world, rng, reference_batch_size, cadence or Cadence())
    run.measured_alone = measured_alone
    return [run.epoch(epoch) for epoch in range(epochs)]


class _Run:
    """Where a simulated run is.

    Args:
        manager: Started.
        world: What it meets.
        rng: Draws the measurements.
        reference: The batch at which a row is worth a row.
        cadence: When a decision is made within a pass.
    """

    measured_alone = True

    def __init__(
        self,
        manager: DynamicBatchSizeManager,
        world: World,
        rng: np.random.Generator,
        reference: int,
        cadence: Cadence,
    ) -> None:
        self._manager, self._world, self._rng = manager, world, rng
        self._reference, self._cadence = reference, cadence
        self._progress = self._time_s = 0.0
        self._step = self._samples = 0

    def epoch(self, epoch: int) -> SimulatedEpoch:
        """One pass, decision by decision."""
        left, first = self._world.num_rows, self._step
        while left:
            plan, scale = self._manager.plan, self._manager.lr_scale
            noise = self._world.noise_scale(self._progress)
            rows = min(left, self._cadence.steps_until_due(plan.global_batch_size) * plan.global_batch_size)
            left -= rows
            decision = self._manager.decide(self._train(epoch, rows, left))
        return SimulatedEpoch(
            epoch=epoch,
            global_batch_size=plan.global_batch_size,
            steps=self._step - first,
            lr_scale=scale,
            noise_scale=noise,
            progress=self._progress,
            loss=self._world.loss(self._progress),
            time_s=self._time_s,
            reasons=decision.reasons,
        )

    def _train(self, epoch: int, rows: int, left: int) -> Signal:
        """Some rows of a pass under the plan in force, and what was measured of them."""
        manager, world = self._manager, self._world
        plan = manager.plan
        size = plan.global_batch_size
        steps = num_steps(rows, size)
        step_s = world.step_time.seconds(plan.world_size, plan.micro_batch_size, plan.grad_accum_steps - 1)
        pieces = min(plan.world_size * plan.grad_accum_steps, size)
        alone = pieces == 1
        pieces = max(pieces, 2)
        measured = _measure(self._rng, world, self._progress, (size, pieces, steps))
        means = measured.means()
        worth = efficiency(size, world.noise_scale(self._progress), self._reference)
        self._progress += worth * rows / world.num_rows
        self._step, self._samples = self._step + steps, self._samples + rows
        self._time_s += steps * step_s
        return Signal.measured(
            epoch=epoch,
            epochs_seen=epoch + 1 - left / world.num_rows,
            step=self._step,
            samples_seen=self._samples,
            plan_version=manager.version,
            world_size=plan.world_size,
            num_steps=steps,
            num_finite_steps=steps,
            rows=rows,
            ends_pass=left == 0,
            grad_norm=math.sqrt(max(means[0] + means[1] / size, 0.0)),
            train_loss=world.loss(self._progress),
            val_loss=world.loss(self._progress) if left == 0 else None,
            memory_fraction=min(world.memory_base + world.memory_per_row * plan.micro_batch_size, 1.0),
            step_time_s=step_s,
            pieces=None if alone and not self.measured_alone else measured,
        )


def _measure(
    rng: np.random.Generator, world: World, progress: float, shape: tuple[int, int, int]
) -> PieceSums:
    """What a pass's steps would have measured: chi-squared noise around the truth, as pieces give it."""
    size, pieces, steps = shape
    square, freedom = world.grad_norm(progress) ** 2, world.dimensions * (pieces - 1)
    variance = world.noise_scale(progress) * square
    drawn = min(steps, MOST_DRAWN)
    within = variance * rng.chisquare(freedom, drawn) / freedom
    spread = math.sqrt(variance / size / world.dimensions)
    along = rng.normal(math.sqrt(square), spread, drawn) ** 2
    across = variance / size * rng.chisquare(max(world.dimensions - 1, 1), drawn) / world.dimensions
    grad = along + across - within / size
    moments = [grad, within, grad**2, within**2, grad * within]
    all_steps = [float(moment.sum()) * steps / drawn for moment in moments]
    return PieceSums(steps, all_steps[0], all_steps[1], all_steps[2], all_steps[3], all_steps[4])
