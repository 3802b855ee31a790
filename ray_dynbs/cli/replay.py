"""``ray-dynbs replay``: a run's decisions again, or what another policy would have made of its signals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from pydantic import ValidationError
from rich.table import Table

from ray_dynbs.cli.exits import FAILED
from ray_dynbs.cli.wide import wide_console
from ray_dynbs.config import Config
from ray_dynbs.config.errors import explain
from ray_dynbs.config.load import parse_yaml
from ray_dynbs.config.schema import Batching, LoopSettings
from ray_dynbs.core.decision import Decision
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.journal import replay, would_have
from ray_dynbs.storage.run_directory import CONFIG, DECISIONS, EARLIER_CONFIGS, RunDirectory

DECIDING = ("batch", "policy", "guards", "lr", "memory", "noise")


def replay_command(run: RunDirectory, policy: Path | None) -> None:
    """Replay a recorded run; with another configuration, say what that one would have decided.

    Args:
        run: Its directory.
        policy: A file whose ``batch``, ``policy``, ``guards``, ``lr``, ``memory`` and ``noise`` to try in
            place of the run's own; others of its keys do not matter.

    Raises:
        ConfigError: there is no journal, or the file is no configuration.
        typer.Exit: the replay differs.
    """
    decisions = run.read_decisions()
    if not decisions:
        raise ConfigError(f"{run.uri}: no decisions recorded ({DECISIONS})")
    if policy is None:
        _replay(run, decisions)
        return
    config = _with_sections_of(run, policy)
    table = Table("epoch", "step", "recorded", policy.stem, "why", box=None)
    for recorded, other in would_have(decisions, config.make_manager):
        sizes = str(recorded.plan.global_batch_size), str(other.plan.global_batch_size)
        table.add_row(str(recorded.epoch + 1), f"{recorded.step:,}", *sizes, "; ".join(other.reasons))
    wide_console().print(table)
    typer.echo("measured under the recorded sizes: what the other policy would have met itself is not known")


def _replay(run: RunDirectory, decisions: Sequence[Decision]) -> None:
    newest = _settings(run.read_text(CONFIG), f"{run.uri}/{CONFIG}")
    earlier = {
        int(name.partition(".")[0]): _settings(
            run.read_text(f"{EARLIER_CONFIGS}/{name}"), f"{run.uri}/{EARLIER_CONFIGS}/{name}"
        ).make_manager
        for name in run.names_in(EARLIER_CONFIGS)
    }
    mismatches = replay(decisions, newest.make_manager, earlier)
    for mismatch in mismatches:
        typer.echo(f"recorded {_said(mismatch.recorded)}; replayed {_said(mismatch.replayed)}", err=True)
    if mismatches:
        typer.echo(
            f"error: {len(mismatches)} of {len(decisions)} decisions do not reproduce: was {CONFIG} edited, "
            "or the code of a policy?",
            err=True,
        )
        raise typer.Exit(FAILED)
    typer.echo(f"all {len(decisions)} decisions reproduce, bit for bit")


def _settings(text: str, where: str) -> Batching:
    """How a run decides, from its own record: a configuration, or the settings of an adopted loop."""
    data = parse_yaml(text)
    try:
        if isinstance(data, dict) and "task" in data:
            return Config.model_validate(data)
        return LoopSettings.model_validate({k: v for k, v in dict(data or {}).items() if k != "name"})
    except (ValidationError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())[:200]}") from error


def _with_sections_of(run: RunDirectory, path: Path) -> Batching:
    """A run's own settings with the deciding sections of a file in their places."""
    try:
        given = parse_yaml(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    sections = (
        {key: value for key, value in given.items() if key in DECIDING} if isinstance(given, dict) else {}
    )
    if not sections:
        raise ConfigError(f"{path}: holds none of {', '.join(DECIDING)}; allowed: at least one")
    own = _settings(run.read_text(CONFIG), f"{run.uri}/{CONFIG}")
    try:
        return type(own).model_validate({**own.model_dump(), **sections})
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, model=type(own))}") from error


def _said(decision: Decision) -> str:
    plan = decision.plan
    sizes = f"{plan.global_batch_size} ({plan.micro_batch_size} x {plan.grad_accum_steps})"
    why = "; ".join(decision.reasons)
    return f"{decision.incarnation}.{decision.version}: {sizes}, lr_scale {decision.lr_scale:g}, {why}"
