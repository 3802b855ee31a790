"""One optimizer step over any number of micro-batches, on any number of ranks.

The gradient of a step is the sum of losses over the sum of weights of the whole step, however it is
split: every micro-batch back-propagates its loss *sum* (divided by the number of rows, which keeps
fp16 in range), the sums are added over ranks, and the total is divided once by the total weight.
A rank without rows takes part with zeros.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.lr import Adjustment
from ray_dynbs.training.gradients import FlatGradients
from ray_dynbs.training.lr import adjusted
from ray_dynbs.training.noise import Measure, NoiseMeter, Pieces
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.stopwatch import Stopwatch
from ray_dynbs.training.world import World

Batch = Any
LossFn = Callable[[Batch], tuple[Any, ...]]
"""Micro-batch -> (sum of losses, weight): the weight is what the plain mean would divide by.

A third value, where there is one, is handed back in the step's result (scores for a running metric, say).
"""
OnNonfinite = Literal["stop", "skip"]


@dataclass(frozen=True)
class StepResult:
    """What one step did; tensors stay on the device.

    Attributes:
        loss_sum: Sum of losses over the whole step, scalar.
        weight: Sum of weights over the whole step, scalar.
        grad_norm: L2 norm of the step's mean gradient before clipping, scalar.
        applied: Whether the optimizer stepped; ``False`` where the step was not finite and left out.
        pieces: Of a measured step, what its pieces say of the gradient's noise.
        outputs: What the loss function returned beside sum and weight, one for each micro-batch of this
            rank.
    """

    loss_sum: torch.Tensor
    weight: torch.Tensor
    grad_norm: torch.Tensor
    applied: bool
    pieces: Pieces | None = None
    outputs: tuple[Any, ...] = ()

    @property
    def loss(self) -> torch.Tensor:
        """Mean loss of the whole step over all ranks, scalar on the device."""
        return self.loss_sum / self.weight


class OptimizerStep:
    """Forward, backward, reduction, clipping and the optimizer for one global batch.

    Args:
        model: The plain model (not wrapped for data parallelism), already on ``world.device``.
        optimizers: Its optimizer, or several that step together.
        world: The ranks taking part.
        precision: Autocast and loss scaling.
        clip_grad_norm: Largest gradient norm given to the optimizer, or ``None``.
        preconditioned: Measure gradient noise in Adam's metric.
        on_nonfinite: ``skip`` leaves out a step whose loss or gradient is not finite, for which every step
            waits for the device; ``stop`` takes it, and leaves it to the caller to notice.

    Raises:
        ConfigError: the model holds a layer whose forward is a collective, or gradients that do not
            fit one buffer (see :class:`FlatGradients`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        world: World,
        precision: MixedPrecision,
        *,
        clip_grad_norm: float | None = None,
        on_nonfinite: OnNonfinite = "stop",
        preconditioned: bool = False,
    ) -> None:
        refuse_collective_layers(model)
        one = isinstance(optimizers, torch.optim.Optimizer)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (optimizers,) if one else tuple(optimizers)  # type: ignore[arg-type,assignment]
        self._skips = on_nonfinite == "skip"
        self._world = world
        self._precision = precision
        self._clip_grad_norm = clip_grad_norm
        self.gradients = FlatGradients(model.parameters(), self.optimizers)
        self.noise = NoiseMeter(self.gradients, self.optimizers, world, preconditioned=preconditioned)
        known = {id(p) for p in model.parameters()}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if any(id(p) not in known for group in groups for p in group["params"]):
            raise ConfigError(
                "the optimizer has parameters that the model has not; allowed: the model's only"
            )

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step that is not finite leaves the weights alone (fp16's scaler sees to that too)."""
        return self._skips or self._precision.scaler.is_enabled()

    @property
    def held_bytes(self) -> int:
        """What it keeps from step to step: gradients and the optimizers' state."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        tensors = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
        return self.gradients.flat.nbytes + sum(each.nbytes for each in tensors)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block steps are this rank's own: no collective, nothing to wait for."""
        world, self._world = self._world, World(0, 1, self._world.device)
        try:
            yield
        finally:
            self._world = world

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context of the forward."""
        return self._precision.autocast()

    def run(
        self,
        micro_batches: Iterable[Batch],
        loss_fn: LossFn,
        *,
        rows: int,
        adjustment: Adjustment,
        measure: Measure | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> StepResult:
        """Take one optimizer step.

        Args:
            micro_batches: This rank's part of the global batch; may be empty.
            loss_fn: Loss sum and weight of a micro-batch.
            rows: Rows of the whole step over all ranks, at least 1.
            adjustment: Of the optimizers' settings, for this step only.
            measure: What to measure of the gradient's noise.
            stopwatch: Times that.
        """
        self.gradients.zero()
        self._precision.begin()
        noise = self.noise.of_step(measure, stopwatch)
        outputs: list[Any] = []
        for micro_batch in micro_batches:
            with self._precision.autocast():
                result = loss_fn(micro_batch)
            loss_sum, weight = sum_and_weight(result)
            outputs += result[2:]
            if _is_known_zero(weight):
                continue  # nothing to learn from, and a mean over nothing is NaN
            loss = self._precision.scaler.scale(loss_sum / rows)
            with noise.around_backward() as add_piece:
                loss.backward()
                add_piece(weight)
            self.gradients.add_loss(loss_sum, weight)
        noise.before_reduction()
        loss_sum, weight = self.gradients.reduce(self._world)
        scaler = self._precision.scaler
        noise.after_reduction(rows, weight, scaler.get_scale() if scaler.is_enabled() else 1.0)
        norm = self._finish_gradients(rows, weight)
        pieces = noise.of_mean(norm)
        if self._clip_grad_norm is not None:
            self.gradients.clip(norm, self._clip_grad_norm)
        applied = self._apply(adjustment, norm + loss_sum)
        return StepResult(loss_sum, weight, norm, applied, pieces, tuple(outputs))

    def _finish_gradients(self, rows: int, weight: torch.Tensor) -> torch.Tensor:
        """From sums over ``rows`` to the mean over the weight, unscaled; returns its norm."""
        for optimizer in self.optimizers:
            self._precision.scaler.unscale_(optimizer)
        # No weight, no gradient; a negative one is nonsense and shows as NaN instead of training on.
        factor = torch.where(weight == 0, 0.0, rows / weight)
        self.gradients.scale(torch.where(weight < 0, torch.nan, factor))
        return self.gradients.norm()

    def _apply(self, adjustment: Adjustment, finite_if_sound: torch.Tensor) -> bool:
        """Step the optimizers, unless the step is left out; all ranks hold the same numbers and agree."""
        scaler = self._precision.scaler
        finite = not self.skips_nonfinite or bool(torch.isfinite(finite_if_sound))
        if not finite:  # for all optimizers alike; the scaler has seen it too, and lowers its scale
            scaler.update()
            return False
        before = scaler.get_scale() if scaler.is_enabled() else 1.0
        with contextlib.ExitStack() as changed:
            for optimizer in self.optimizers:
                changed.enter_context(adjusted(optimizer, adjustment))
            for optimizer in self.optimizers:
                scaler.step(optimizer)
        scaler.update()
        return not scaler.is_enabled() or scaler.get_scale() >= before > 0


def _is_known_zero(weight: Any) -> bool:
    """Whether a weight is 0, as far as that can be told without waiting for a device."""
    return not (isinstance(weight, torch.Tensor) and weight.device.type != "cpu") and float(weight) == 0


def sum_and_weight(result: Any) -> tuple[torch.Tensor, Any]:
    """The two numbers of a loss function, or a message that says what they should be.

    Raises:
        ConfigError: something else was returned.
    """
    wanted = "allowed: (sum of the losses, weight), each one number"
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        shape = f" of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else ""
        raise ConfigError(f"loss returned {type(result).__name__}{shape}; {wanted}")
    loss_sum, weight = result[:2]
    for value in (loss_sum, weight):
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ConfigError(f"loss returned a tensor of shape {tuple(value.shape)}; {wanted}")
    if not isinstance(loss_sum, torch.Tensor):
        raise ConfigError(
            f"loss returned the sum as {type(loss_sum).__name__}; allowed: a tensor of one number"
        )
    if not isinstance(weight, torch.Tensor | numbers.Real):
        raise ConfigError(f"loss returned the weight as {type(weight).__name__}; {wanted}")
    return loss_sum.reshape(()), weight.reshape(()) if isinstance(weight, torch.Tensor) else weight


def refuse_collective_layers(model: torch.nn.Module) -> None:
    """Refuse a model that would hang where ranks hold different numbers of micro-batches.

    Raises:
        ConfigError: a layer whose forward is a collective; names it.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            raise ConfigError(
                f"layer {name} is SyncBatchNorm, whose forward waits for every rank, but ranks may "
                "hold different numbers of micro-batches; use BatchNorm, GroupNorm or LayerNorm"
            )
