"""Loss and metrics over the validation rows, every row once, summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ray_dynbs.training.columns import TensorBatch
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.step import LossFn, sum_and_weight
from ray_dynbs.training.world import World

Sums = Mapping[str, "torch.Tensor | float | tuple[torch.Tensor | float, torch.Tensor | float]"]
MetricsFn = Callable[[TensorBatch], Sums]
"""Batch -> name -> sum over its rows, or (sum, weight) where the mean is not over rows."""


def evaluate(
    model: torch.nn.Module,
    batches: Iterable[TensorBatch],
    loss_fn: LossFn,
    metrics_fn: MetricsFn | None,
    *,
    world: World,
    precision: MixedPrecision,
) -> dict[str, float]:
    """Mean loss and metrics over all ranks' batches; the model's mode is put back afterwards.

    Returns:
        ``loss`` and every metric; NaN where there was no weight at all.
    """
    sums: dict[str, torch.Tensor] = {}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), precision.autocast():
            for batch in batches:
                for name, pair in batch_sums(batch, loss_fn, metrics_fn, world.device).items():
                    sums[name] = sums[name] + pair if name in sums else pair
    finally:
        model.train(was_training)
    return _means(sums, world)


def batch_sums(
    batch: TensorBatch, loss_fn: LossFn, metrics_fn: MetricsFn | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Loss and metrics of one batch, each as float64 [sum, weight].

    Raises:
        ValueError: a metric is named ``loss``.
        ConfigError: the loss is no pair of sum and weight.
    """
    rows = len(next(iter(batch.values())))
    found: dict[str, Any] = {"loss": sum_and_weight(loss_fn(batch))}
    for name, value in (metrics_fn(batch) if metrics_fn else {}).items():
        if name == "loss":
            raise ValueError("metrics returned 'loss', which is the loss's own name; use another")
        found[name] = value if isinstance(value, tuple) else (value, rows)
    return {
        name: torch.stack([torch.as_tensor(number, device=device).double() for number in pair])
        for name, pair in found.items()
    }


def _means(sums: dict[str, torch.Tensor], world: World) -> dict[str, float]:
    """One reduction for all names; a rank without rows learns them from rank 0, whose share is largest."""
    names = world.broadcast_object(list(sums))
    if not names:
        return {}
    zero = torch.zeros(2, dtype=torch.float64, device=world.device)
    table = world.sum_(torch.stack([sums.get(name, zero) for name in names]))
    return {name: (s / w if w else float("nan")) for name, (s, w) in zip(names, table.tolist(), strict=True)}
