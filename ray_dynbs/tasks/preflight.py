"""Everything that can be found wrong before Ray starts, and everything worth a warning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ray_dynbs.config import Config
from ray_dynbs.config.components import build_guards
from ray_dynbs.config.fits import order_of_guards
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.lr import LR_RULES
from ray_dynbs.tasks.loading import load_task
from ray_dynbs.tasks.sources import NeedsClusterError, Source, count_rows, resolve_sources
from ray_dynbs.tasks.trial import try_task
from ray_dynbs.training.optimizers import build_optimizer, build_scheduler
from ray_dynbs.training.recompute import checkpoint_activations
from ray_dynbs.training.step import refuse_collective_layers

TRIED_STEPS = 5_000
FAR = 5
"""Multiple of its own median that a gradient norm hardly reaches."""


@dataclass(frozen=True)
class Preflight:
    """What a run will work on.

    Attributes:
        sources: Split -> where its rows come from; ``None`` where the task needs a cluster to say.
        rows: Split -> rows, ``None`` where only a running pipeline can tell.
        warnings: One line each.
        about: What the task has to say of itself; empty for nothing.
        recomputed: Classes of layers whose activations are computed again -> how many.
    """

    sources: dict[str, Source] | None
    rows: dict[str, int | None]
    warnings: tuple[str, ...]
    about: str = ""
    recomputed: Mapping[str, int] = field(default_factory=dict)


def preflight(config: Config) -> Preflight:
    """Check task, data, optimizer and scheduler of a configuration.

    Raises:
        ConfigError: anything that would keep the run from training; one line.
    """
    task = load_task(config.task)
    sources, rows = _look_at_data(config, task)
    model = _check_model(config, task)
    recomputed = _recomputed(config, model)
    check_optimizer_and_scheduler(config, task, rows.get("train"))
    if sources is not None:
        try_task(config, task, model, sources)
    return Preflight(sources, rows, tuple(_warnings(config, rows)), _about(config, task), recomputed)


def _about(config: Config, task: Any) -> str:
    about = getattr(task, "about", None)
    if about is None:
        return ""
    try:
        return " ".join(str(about(config)).split())
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"task {config.task!r}: about() failed: {reason}") from error


def _look_at_data(config: Config, task: Any) -> tuple[dict[str, Source] | None, dict[str, int | None]]:
    try:
        sources = resolve_sources(config, task)
    except NeedsClusterError:
        return None, {}
    data = config.data
    return sources, {split: count_rows(split, s, data.columns, data.label) for split, s in sources.items()}


def _check_model(config: Config, task: Any) -> torch.nn.Module:
    """Build the model without memory for its weights, or for real where it needs that, to hear complaints.

    Raises:
        ConfigError: the model refuses its arguments, or cannot be trained in parallel micro-batches.
    """
    try:
        model = _build_somehow(config, task)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"task {config.task!r}: build_model() failed: {reason}") from error
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise ConfigError(f"task {config.task!r}: build_model() returned {kind}; allowed: a torch module")
    refuse_collective_layers(model)
    return model


def _recomputed(config: Config, model: torch.nn.Module) -> dict[str, int]:
    layers = config.memory.activation_checkpointing
    return {} if layers == "off" else checkpoint_activations(model, layers)


def _build_somehow(config: Config, task: Any) -> Any:
    try:
        with torch.device("meta"):
            return task.build_model(config)
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001  # some models cannot be built without memory
        return task.build_model(config)


def check_optimizer_and_scheduler(config: Config, task: Any, rows: int | None) -> None:
    """Build the configured optimizer and scheduler once, on a single number, and step it through the run.

    Args:
        config: The configuration.
        task: Which may bring its own.
        rows: In a pass, where known.

    Raises:
        ConfigError: they refuse their arguments, or the LR rule does not fit them.
    """
    weight = torch.nn.Parameter(torch.zeros(1))
    if hasattr(task, "build_optimizer"):
        return
    optimizer = build_optimizer(config.optimizer.name, [weight], config.optimizer.arguments)
    config.check_optimizers([optimizer])
    if not hasattr(task, "build_scheduler"):
        section = config.scheduler
        per_epoch = 1
        if section.unit == "step" and rows is not None:
            per_epoch = config.schedule_progress(rows).steps_per_epoch
        planned = config.epochs * per_epoch
        scheduler = build_scheduler(section.name, optimizer, section.arguments, planned)
        _try_out(config, optimizer, scheduler, planned)


def _try_out(config: Config, optimizer: torch.optim.Optimizer, scheduler: Any, planned_steps: int) -> None:
    """Step a scheduler through the run, or its beginning: some refuse their arguments only then.

    Raises:
        ConfigError: it raised, or moves betas to where the LR rule cannot follow; says what.
    """
    if scheduler is None or isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return
    optimizer.step()
    try:
        for _ in range(min(planned_steps, TRIED_STEPS)):
            scheduler.step()
            config.check_optimizers([optimizer])
    except ConfigError as error:
        raise ConfigError(f"scheduler ({config.scheduler.name}): {error}") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"scheduler ({config.scheduler.name}): fails within the run's {planned_steps} steps: {reason}"
        ) from error


def _warnings(config: Config, rows: dict[str, int | None]) -> list[str]:
    found = []
    doubt = LR_RULES[config.lr.rule]().doubt(config.optimizer.name)
    if doubt:
        found.append(doubt)
    order = order_of_guards(build_guards(config.guards))
    if order:
        found.append(order)
    if config.lr.rule == "legw" and config.lr.warmup_epochs == 0:
        found.append("lr.rule legw grows the warm-up with the batch; with lr.warmup_epochs 0 it is sqrt")
    low, high = (config.policy.get(f"grad_norm_{end}") for end in ("low", "high"))
    if config.policy.get("relative") and ((high or 2) > FAR or (low or 0.5) < 1 / FAR):
        found.append(
            f"policy.relative is true: its limits {low or 0.5:g} and {high or 2:g} are multiples of a median"
        )
    if config.lr.progress == "gain" and "auto" in config.scheduler.arguments.values():
        found.append(
            "lr.progress is gain: the scheduler's auto is its number of steps at the reference batch, which "
            "larger batches do not reach within as many epochs"
        )
    if config.memory.headroom == 0 and config.memory.probe != "off":
        found.append("memory.headroom is 0: one row larger than those probed, and memory runs out")
    train = rows.get("train")
    if train is not None and config.batch.initial > train:
        found.append(
            f"batch.initial is {config.batch.initial}, but there are {train} rows: one step per epoch"
        )
    if config.metric.name != "loss" and rows.keys() == {"train"}:
        found.append(
            f"metric {config.metric.name!r} needs validation data; model.pt will be the last epoch's"
        )
    return found
