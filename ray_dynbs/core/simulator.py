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

    num_rows: Annotated[int, Key("rows in a pass", ge=1)] = 50_000
    noise_scale_start: Annotated[float, Key("noise scale at the beginning, rows", gt=0)] = 100.0
    noise_scale_end: Annotated[float, Key("noise scale after `epochs` passes at full efficiency", gt=0)] = (
        5_000.0
    )
    grad_norm_start: Annotated[float, Key("norm of the true gradient at the beginning", gt=0)] = 3.0
    grad_norm_end: Annotated[float, Key("norm of the true gradient at that end", gt=0)] = 0.3
    loss_start: Annotated[float, Key("loss at the beginning")] = 2.3
    loss_end: Annotated[float, Key("loss at that end")] = 0.1
    epochs: Annotated[float, Key("passes that this world is described over", gt=0)] = 20.0
    dimensions: Annotated[int, Key("independent directions of the gradient's noise", ge=1)] = 200
    memory_base: Annotated[float, Key("memory fraction without any row", ge=0, le=1)] = 0.2
    memory_per_row: Annotated[float, Key("memory fraction of one row of a micro-batch", ge=0)] = 0.001
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
        global_batch_size: Rows per step.
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
    seed: int = 0,
) -> list[SimulatedEpoch]:
    """Run a manager through a world, deciding once per pass.

    Args:
        make_manager: Number of ranks -> the manager.
        world: What it meets.
        epochs: Passes.
        world_size: Ranks.
        reference_batch_size: The batch at which a row is worth a row.
        seed: Of the measurements' noise.
    """
    rng, manager = np.random.default_rng(seed), make_manager(world_size)
    manager.start(world_size=world_size, num_rows=world.num_rows)
    found: list[SimulatedEpoch] = []
    progress = time_s = 0.0
    step = 0
    for epoch in range(epochs):
        plan, scale = manager.plan, manager.lr_scale
        size, noise = plan.global_batch_size, world.noise_scale(progress)
        steps = num_steps(world.num_rows, size)
        step_s = world.step_time.seconds(plan.world_size, plan.micro_batch_size, plan.grad_accum_steps - 1)
        pieces = max(plan.world_size * plan.grad_accum_steps, 2)
        measured = _measure(rng, world, progress, (size, pieces, steps))
        worth = efficiency(size, noise, reference_batch_size)
        progress, step, time_s = progress + worth, step + steps, time_s + steps * step_s
        means = measured.means()
        signal = Signal.measured(
            epoch=epoch,
            epochs_seen=float(epoch + 1),
            step=step,
            samples_seen=(epoch + 1) * world.num_rows,
            plan_version=manager.version,
            world_size=world_size,
            num_steps=steps,
            num_finite_steps=steps,
            rows=world.num_rows,
            grad_norm=math.sqrt(max(means[0] + means[1] / size, 0.0)),
            train_loss=world.loss(progress),
            memory_fraction=min(world.memory_base + world.memory_per_row * plan.micro_batch_size, 1.0),
            step_time_s=step_s,
            pieces=measured,
        )
        decision = manager.decide(signal)
        found.append(
            SimulatedEpoch(
                epoch, size, steps, scale, noise, progress, world.loss(progress), time_s, decision.reasons
            )
        )
    return found


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
