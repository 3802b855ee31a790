"""One optimizer step over any number of micro-batches, on any number of ranks.

The gradient of a step is the sum of losses over the sum of weights of the whole step, however it is
split: every micro-batch back-propagates its loss *sum* (divided by the number of rows, which keeps
fp16 in range), the sums are added over ranks, and the total is divided once by the total weight.
A rank without rows takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.training.gradients import FlatGradients
from ray_dynbs.training.lr import scaled_lr
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.world import World

Batch = Any
LossFn = Callable[[Batch], tuple[torch.Tensor, torch.Tensor | float]]
"""Micro-batch -> (sum of losses, weight): the weight is what the plain mean would divide by."""


@dataclass(frozen=True)
class StepResult:
    """What one step did; tensors stay on the device.

    Attributes:
        loss_sum: Sum of losses over the whole step, scalar.
        weight: Sum of weights over the whole step, scalar.
        grad_norm: L2 norm of the step's mean gradient before clipping, scalar.
        applied: Whether the optimizer stepped; ``False`` where the fp16 scaler skipped it.
    """

    loss_sum: torch.Tensor
    weight: torch.Tensor
    grad_norm: torch.Tensor
    applied: bool


class OptimizerStep:
    """Forward, backward, reduction, clipping and the optimizer for one global batch.

    Args:
        model: The plain model (not wrapped for data parallelism), already on ``world.device``.
        optimizer: Its optimizer.
        world: The ranks taking part.
        precision: Autocast and loss scaling.
        clip_grad_norm: Largest gradient norm given to the optimizer, or ``None``.

    Raises:
        ConfigError: the model holds a layer whose forward is a collective, or gradients that do not
            fit one buffer (see :class:`FlatGradients`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        precision: MixedPrecision,
        *,
        clip_grad_norm: float | None = None,
    ) -> None:
        refuse_collective_layers(model)
        self._optimizer = optimizer
        self._world = world
        self._precision = precision
        self._clip_grad_norm = clip_grad_norm
        self.gradients = FlatGradients(model.parameters())
        known = {id(p) for p in model.parameters()}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                "the optimizer has parameters that the model has not; allowed: the model's only"
            )

    @property
    def skips_overflow(self) -> bool:
        """Whether a step that is not finite leaves the weights alone (fp16's scaler sees to that)."""
        return self._precision.scaler.is_enabled()

    def run(
        self, micro_batches: Iterable[Batch], loss_fn: LossFn, *, rows: int, lr_scale: float
    ) -> StepResult:
        """Take one optimizer step.

        Args:
            micro_batches: This rank's part of the global batch; may be empty.
            loss_fn: Loss sum and weight of a micro-batch.
            rows: Rows of the whole step over all ranks, at least 1.
            lr_scale: Multiplier on the LR for this step only.
        """
        self.gradients.zero()
        for micro_batch in micro_batches:
            with self._precision.autocast():
                loss_sum, weight = _sum_and_weight(loss_fn(micro_batch))
            self._precision.scaler.scale(loss_sum / rows).backward()
            self.gradients.add_loss(loss_sum, weight)
        loss_sum, weight = self.gradients.reduce(self._world)
        norm = self._finish_gradients(rows, weight)
        applied = self._apply(lr_scale)
        return StepResult(loss_sum, weight, norm, applied)

    def _finish_gradients(self, rows: int, weight: torch.Tensor) -> torch.Tensor:
        """From sums over ``rows`` to the mean over the weight, unscaled; returns its norm."""
        self._precision.scaler.unscale_(self._optimizer)
        # No weight, no gradient; a negative one is nonsense and shows as NaN instead of training on.
        factor = torch.where(weight == 0, 0.0, rows / weight)
        self.gradients.scale(torch.where(weight < 0, torch.nan, factor))
        norm = self.gradients.norm()
        if self._clip_grad_norm is not None:
            self.gradients.clip(norm, self._clip_grad_norm)
        return norm

    def _apply(self, lr_scale: float) -> bool:
        scaler = self._precision.scaler
        before = scaler.get_scale() if scaler.is_enabled() else 1.0
        with scaled_lr(self._optimizer, lr_scale):
            scaler.step(self._optimizer)
        scaler.update()
        return not scaler.is_enabled() or scaler.get_scale() >= before > 0


def _sum_and_weight(result: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The two numbers of a loss function, or a message that says what they should be."""
    wanted = "allowed: (sum of the losses, weight), each one number"
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"loss returned {type(result).__name__}; {wanted}")
    loss_sum, weight = result
    for value in (loss_sum, weight):
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise TypeError(f"loss returned a tensor of shape {tuple(value.shape)}; {wanted}")
    if not isinstance(loss_sum, torch.Tensor):
        raise TypeError(
            f"loss returned the sum as {type(loss_sum).__name__}; allowed: a tensor of one number"
        )
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
