"""Whether a loss or metric is the sum over rows that it has to be, found out on a few rows.

A sum over rows adds up: its value for some rows is that of one half plus that of the other. A mean that
was returned by mistake does not, and nothing else would show it: gradients come out too small by the
size of the micro-batch.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.training.step import sum_and_weight

PROBE_ROWS = 16
# Far above what reduced precision or a sum's order makes of equal numbers, far below a mean's factor of two.
_TOLERANCE = 0.05
Pair = tuple[float, float]


def check_loss_is_sum(
    loss_fn: Callable[[Any], Any], batches: Iterable[Any], model: torch.nn.Module, autocast: Any = None
) -> str | None:
    """Evaluate a loss on a batch, twice, and on its two halves, leaving no trace, and compare.

    The model is in evaluation mode meanwhile, so that dropout and BatchNorm do not disturb.

    Args:
        loss_fn: Loss sum and weight of a batch.
        batches: The same rows as one batch, as one again, and as two; may be gathered while iterating.
        model: What the loss calls.
        autocast: Context for the forward, if any.

    Returns:
        Why nothing could be told: the loss raises in evaluation mode, or does not repeat itself (random
        masks, say); ``None`` where it is a sum.

    Raises:
        ConfigError: sum or weight do not add up; says how to mend it.
    """
    found: list[Pair] = []
    with untouched(model):
        try:
            for batch in batches:
                with autocast or contextlib.nullcontext():
                    loss_sum, weight = sum_and_weight(loss_fn(batch))
                found.append((float(loss_sum), float(weight)))
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  # the real step raises it again, where it belongs
            return f"in evaluation mode it raises {type(error).__name__}"
    whole, again, *halves = found
    if whole != again:
        return "it does not repeat itself on the same rows"
    refuse_mean("loss", whole, *halves)
    return None


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
    """Evaluate inside, without gradients; modes, buffers and random numbers are as before afterwards.

    The mode is set as an attribute: ``model.eval()`` may be the user's own and do more (merge adapters, say).
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
    others = random.getstate(), np.random.get_state()  # noqa: NPY002  # the one users' data sets draw from
    with torch.random.fork_rng(devices=[] if device is None else [device]), torch.no_grad():
        for module, _ in modes:
            module.training = False
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for buffer, value in buffers:
                buffer.copy_(value)
            random.setstate(others[0])
            np.random.set_state(others[1])  # noqa: NPY002
