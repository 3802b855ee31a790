"""``ray-dynbs simulate``: what a policy would do in a world of given noise, speed and memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from ray_dynbs.cli.wide import wide_console
from ray_dynbs.config import Config
from ray_dynbs.config.errors import nearest
from ray_dynbs.config.load import parse_yaml
from ray_dynbs.config.simulated import simulated
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators.step_time import StepTimeModel
from ray_dynbs.core.keys import keys_of
from ray_dynbs.core.simulator import SimulatedEpoch, World
from ray_dynbs.tasks.loading import load_task
from ray_dynbs.tasks.sources import NeedsClusterError, count_rows, resolve_sources


def simulate_command(config: Config, *, world: Sequence[str], seed: int, plot: Path | None) -> None:
    """Run the configuration's policy through a world, print every pass, and draw it.

    Args:
        config: Batch, policy, guards, LR rule, epochs and workers.
        world: ``key=value`` for the world's keys.
        seed: Of the measurements' noise.
        plot: Where to put a picture.

    Raises:
        ConfigError: an unknown key of the world, or a value not allowed.
    """
    if list(world) == ["help"]:
        _print_world()
        return
    met = _world(world, config)
    epochs = _run(config, met, seed)
    _print(epochs)
    said = f"simulated: {met.num_rows:,} rows a pass, noise scale {met.noise_scale_start:g} to "
    typer.echo(f"{said}{met.noise_scale_end:g}; --world KEY=NUMBER changes that, --world help lists the keys")
    if plot is not None:
        try:
            plot.write_bytes(_draw(epochs, config))
        except OSError as error:
            raise ConfigError(f"--plot {plot}: {error.strerror}") from error
        typer.echo(str(plot))


def _draw(epochs: list[SimulatedEpoch], config: Config) -> bytes:
    from ray_dynbs.report.simulation import draw_simulation

    return draw_simulation(epochs, config.policy["name"])


def _run(config: Config, world: World, seed: int) -> list[SimulatedEpoch]:
    """Simulate; what a user's own policy raises is told in one line."""
    try:
        return simulated(config, world, seed)
    except (ConfigError, KeyboardInterrupt):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"policy {config.policy['name']} or a guard failed: {reason}") from error


def _world(assignments: Sequence[str], config: Config) -> World:
    """A world with some keys changed; ``step_time.`` in front of those of the step-time model."""
    rows = _rows_of_data(config)
    changes: dict[str, Any] = {} if rows is None else {"num_rows": rows}
    times: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        place, name = (
            (times, key.removeprefix("step_time.")) if key.startswith("step_time.") else (changes, key)
        )
        allowed = {f.name: f for f in dataclasses.fields(StepTimeModel if place is times else World)}
        allowed.pop("step_time", None)
        if not equals or name not in allowed:
            close = nearest(name, allowed)
            raise ConfigError(
                f"--world {assignment!r}{close}: allowed: KEY=NUMBER with {', '.join(_world_keys())}"
            )
        number = parse_yaml(value)
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ConfigError(f"--world {key} is {value!r}; allowed: a number")
        whole = "int" in str(allowed[name].type)
        if whole and number != int(number):
            raise ConfigError(f"--world {key} is {value!r}; allowed: a whole number")
        place[name] = int(number) if whole else float(number)
    world = dataclasses.replace(World(), **changes)
    return dataclasses.replace(world, step_time=dataclasses.replace(world.step_time, **times))


def _rows_of_data(config: Config) -> int | None:
    """Rows of the configuration's training data, where they can be counted at once."""
    try:
        source = resolve_sources(config, load_task(config.task))["train"]
        return count_rows("train", source, config.data.columns, config.data.label)
    except (ConfigError, NeedsClusterError):
        return None


def _print_world() -> None:
    """Every key of the simulated world, its meaning and default."""
    for kind, prefix in ((World, ""), (StepTimeModel, "step_time.")):
        defaults = World() if kind is World else World().step_time
        for name, key in keys_of(kind).items():
            typer.echo(f"{prefix}{name}: {key.doc}; {key.allowed()}; default {getattr(defaults, name):g}")


def _world_keys() -> list[str]:
    own = [field.name for field in dataclasses.fields(World) if field.name != "step_time"]
    return own + [f"step_time.{field.name}" for field in dataclasses.fields(StepTimeModel)]


def _print(epochs: Sequence[SimulatedEpoch]) -> None:
    table = Table(box=None, header_style="bold")
    for name in ("epoch", "batch", "steps", "lr scale", "noise scale", "worth", "loss", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("next")
    for each in epochs:
        table.add_row(
            str(each.epoch + 1),
            str(each.global_batch_size),
            f"{each.steps:,}",
            f"{each.lr_scale:.3g}",
            f"{each.noise_scale:,.0f}",
            f"{each.progress:.2f}",
            f"{each.loss:.3f}",
            f"{each.time_s:,.1f} s",
            "; ".join(each.reasons),
        )
    wide_console().print(table)
    last = epochs[-1]
    typer.echo(
        f"{sum(each.steps for each in epochs):,} steps in {last.time_s:,.1f} s, worth {last.progress:.2f} "
        "passes at the reference batch"
    )
