"""``ray-dynbs simulate`` and ``replay``: what a policy would do, and what it would have done."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from ray_dynbs.cli.exits import FAILED
from ray_dynbs.config import Config, load_config
from ray_dynbs.config.load import parse_yaml
from ray_dynbs.core.decision import Decision
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators.step_time import StepTimeModel
from ray_dynbs.core.journal import decode_lines, replay, would_have
from ray_dynbs.core.simulator import SimulatedEpoch, World, simulate
from ray_dynbs.storage.run_directory import CONFIG, DECISIONS, RunDirectory


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
    epochs = simulate(
        config.make_manager,
        _world(world),
        epochs=config.epochs,
        world_size=config.cluster.worker_range[1],
        reference_batch_size=config.reference_batch_size,
        seed=seed,
    )
    _print(epochs)
    if plot is not None:
        from ray_dynbs.report.simulation import draw_simulation

        plot.write_bytes(draw_simulation(epochs, config.policy["name"]))
        typer.echo(str(plot))


def replay_command(run: RunDirectory, policy: Path | None) -> None:
    """Replay a recorded run; with another configuration, say what that one would have decided.

    Args:
        run: Its directory.
        policy: A configuration whose batch, policy, guards and LR rule to try.

    Raises:
        ConfigError: there is no journal.
        typer.Exit: the replay differs.
    """
    decisions = decode_lines(run.read_text(DECISIONS))
    if not decisions:
        raise ConfigError(f"{run.uri}: no decisions recorded ({DECISIONS})")
    if policy is None:
        with_its_own = load_config(Path(run.absolute_uri) / CONFIG) if "://" not in run.uri else None
        if with_its_own is None:
            raise ConfigError(f"{run.uri}: its configuration lies on a bucket; allowed: --policy FILE")
        mismatches = replay(decisions, with_its_own.make_manager)
        for mismatch in mismatches:
            typer.echo(f"recorded {_said(mismatch.recorded)}; replayed {_said(mismatch.replayed)}", err=True)
        if mismatches:
            typer.echo(f"error: {len(mismatches)} of {len(decisions)} decisions do not reproduce", err=True)
            raise typer.Exit(FAILED)
        typer.echo(f"all {len(decisions)} decisions reproduce, bit for bit")
        return
    config = load_config(policy)
    table = Table("epoch", "recorded", policy.stem, "why", box=None)
    for recorded, other in would_have(decisions, config.make_manager):
        sizes = recorded.plan.global_batch_size, other.plan.global_batch_size
        table.add_row(str(recorded.epoch + 1), str(sizes[0]), str(sizes[1]), "; ".join(other.reasons))
    Console().print(table)
    typer.echo("measured under the recorded sizes: what the other policy would have met itself is not known")


def _said(decision: Decision) -> str:
    plan = decision.plan
    sizes = f"{plan.global_batch_size} ({plan.micro_batch_size} x {plan.grad_accum_steps})"
    why = "; ".join(decision.reasons)
    return f"{decision.incarnation}.{decision.version}: {sizes}, lr_scale {decision.lr_scale:g}, {why}"


def _world(assignments: Sequence[str]) -> World:
    """A world with some keys changed; ``step_time.`` in front of those of the step-time model."""
    changes: dict[str, Any] = {}
    times: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        place, name = (
            (times, key.removeprefix("step_time.")) if key.startswith("step_time.") else (changes, key)
        )
        allowed = {f.name: f for f in dataclasses.fields(StepTimeModel if place is times else World)}
        allowed.pop("step_time", None)
        if not equals or name not in allowed:
            raise ConfigError(f"--world {assignment!r}: allowed: KEY=NUMBER with {', '.join(_world_keys())}")
        number = parse_yaml(value)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ConfigError(f"--world {key} is {value!r}; allowed: a number")
        place[name] = (
            number if allowed[name].type == "int" or "int" in str(allowed[name].type) else float(number)
        )
    world = dataclasses.replace(World(), **changes)
    return dataclasses.replace(world, step_time=dataclasses.replace(world.step_time, **times))


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
    Console().print(table)
    last = epochs[-1]
    typer.echo(
        f"{sum(each.steps for each in epochs):,} steps in {last.time_s:,.1f} s, worth {last.progress:.2f} "
        "passes at the reference batch"
    )
