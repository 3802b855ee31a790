"""A task: the parts of training that are the user's own.

A module or object with

* ``build_model(config) -> Module``
* ``loss(model, batch) -> (sum, weight)``: the *sum* of the losses of a micro-batch, and its weight:
  what the plain mean would divide by (rows, or tokens)
* ``metrics(model, batch) -> {name: sum or (sum, weight)}``, optional
* ``datasets(config) -> {"train": ..., "validation": ...}``, optional where the configuration's ``data``
  section names files: Parquet paths or Ray data sets
* ``about(config) -> str``, optional: a line to print at the start of a run
* ``build_optimizer(config, model)`` and ``build_scheduler(config, optimizer, planned_steps)``,
  optional where the configuration's blocks are not enough
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError

PARTS = ("build_model", "loss")


class Task(Protocol):
    """The parts every task has."""

    def build_model(self, config: Config) -> torch.nn.Module:
        """A new model."""

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Sum of losses and weight."""


def load_task(path: str) -> Any:
    """Import a task.

    Args:
        path: ``package.module``, ``package.module:object`` or ``package.module.object``.

    Raises:
        ConfigError: it does not import, or lacks a part.
    """
    task = _find(path)
    missing = [part for part in PARTS if not callable(getattr(task, part, None))]
    if missing:
        raise ConfigError(f"task {path!r} has no {', '.join(missing)}; a task has build_model and loss")
    return task


def _find(path: str) -> Any:
    module_name, colon, attribute = path.partition(":")
    try:
        if not colon and "." in path and not _is_module(path):
            module_name, _, attribute = path.rpartition(".")
        module = importlib.import_module(module_name)
        return getattr(module, attribute) if attribute else module
    except (Exception, SystemExit) as error:  # the user's module may do anything while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"task {path!r} does not import: {reason}") from error


def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False
