"""Whether a loss or metric is the sum over rows that it has to be, found out on a few rows.

A sum over rows adds up: its value for some rows is that of one half plus that of the other. A mean that
was returned by mistake does not, and nothing else would show it: gradients come out too small by the
size of the micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.training.step import sum_and_weight

PROBE_ROWS = 16
# Far above what reduced precision or a sum's order makes of equal numbers, far below a mean's factor of two.
_TOLERANCE = 0.05
Pair = tuple[float, float]


def check_loss_is_sum(
    loss_fn: Callable[[Any], Any], batches: tuple[Any, Any, Any], model: torch.nn.Module
) -> None:
    """Evaluate a loss on a batch and on its two halves, leaving no trace, and compare.

    The model is in evaluation mode meanwhile, so that dropout and BatchNorm do not disturb; where that
    raises, as some models do, nothing is checked.

    Args:
        loss_fn: Loss sum and weight of a batch.
        batches: The same rows as one batch and as two.
        model: What the loss calls.

    Raises:
        ConfigError: sum or weight do not add up; says how to mend it.
    """
    found = []
    with untouched(model):
        try:
            for batch in batches:
                loss_sum, weight = sum_and_weight(loss_fn(batch))
                found.append((float(loss_sum), float(weight)))
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001  # the real step raises it again, where it belongs
            return
    refuse_mean("loss", *found)


def refuse_mean(what: str, whole: Pair, first: Pair, second: Pair) -> None:
    """Compare (sum, weight) of a batch with those of its two halves.

    Raises:
        ConfigError: the weight does not add up, or the sum is a mean. What couples rows, and so adds up
            to neither, is let through.
    """
    (total, weight), (a, a_weight), (b, b_weight) = whole, first, second
    if _differ(weight, a_weight + b_weight):
        raise ConfigError(
            f"{what} has weight {weight:g} on a batch, {a_weight:g} and {b_weight:g} on its halves; "
            "allowed: weights that add up, such as the number of rows or tokens"
        )
    is_mean = not _differ(total * weight, a * a_weight + b * b_weight)
    if is_mean and _differ(total, a + b):
        raise ConfigError(
            f"{what} is {total:.4g} on a batch, {a:.4g} and {b:.4g} on its halves: a mean; allowed: the sum "
            "over rows (reduction='sum', or the mean times its weight)"
        )


def _differ(found: float, expected: float) -> bool:
    return abs(found - expected) > _TOLERANCE * max(abs(found), abs(expected), 1e-12)


@contextlib.contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Evaluate inside: no gradients, evaluation mode; modes and random numbers are as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
    with torch.random.fork_rng(devices=[] if device is None else [device]), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
