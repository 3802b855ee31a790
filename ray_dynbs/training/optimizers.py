"""Optimizers and schedulers by name, for configurations."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.training.lr import scheduler_class

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


_NOT_THE_USERS = ("params", "optimizer", "self", "last_epoch")


def build_optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], arguments: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer over the trainable parameters.

    Raises:
        ConfigError: an argument that this optimizer does not take, or a value it refuses.
    """
    kind = OPTIMIZERS[name]
    check_arguments(f"optimizer ({name})", kind, arguments)
    trainable = [p for p in parameters if p.requires_grad]
    try:
        return kind(trainable, **arguments)
    except Exception as error:  # torch checks its arguments with errors of many kinds
        raise ConfigError(f"optimizer ({name}): {type(error).__name__}: {error}") from error


def build_scheduler(
    name: str, optimizer: torch.optim.Optimizer, arguments: Mapping[str, Any], planned_steps: int
) -> lr_scheduler.LRScheduler | None:
    """A torch scheduler, or ``None`` for ``none``.

    Args:
        name: Class name in ``torch.optim.lr_scheduler``.
        optimizer: What it drives.
        arguments: Its arguments; the value ``auto`` stands for ``planned_steps``.
        planned_steps: Scheduler steps in the whole run, in the unit the scheduler counts.

    Raises:
        ConfigError: unknown name, or arguments it does not take.
    """
    if name == "none":
        return None
    kind = scheduler_class(name)
    check_arguments(f"scheduler ({name})", kind, arguments)
    filled = {key: planned_steps if value == "auto" else value for key, value in arguments.items()}
    try:
        return kind(optimizer, **filled)
    except Exception as error:  # torch checks its arguments with errors of many kinds
        reason = str(error).removeprefix(f"{name}.__init__() ")
        raise ConfigError(
            f"scheduler ({name}): {reason}; the value auto stands for the {planned_steps} steps of the run"
        ) from error


def check_arguments(where: str, kind: type, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a class does not take.

    Raises:
        ConfigError: names the argument and those allowed.
    """
    allowed = [p for p in inspect.signature(kind).parameters if p not in _NOT_THE_USERS]
    for key in arguments:
        if key not in allowed:
            raise ConfigError(f"{where}: unknown argument {key!r}; allowed: {', '.join(allowed)}")
