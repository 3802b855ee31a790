"""``ray-dynbs check``: is this configuration going to train, and which keys are there."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import typer

from ray_dynbs.config import Config
from ray_dynbs.config.components import parameters
from ray_dynbs.config.schema import Section
from ray_dynbs.core.guards import GUARDS
from ray_dynbs.core.keys import keys_of
from ray_dynbs.core.lr import LR_RULES
from ray_dynbs.core.policies import POLICIES
from ray_dynbs.tasks.preflight import preflight


def check_command(config: Config) -> None:
    """Check everything that can be checked without training.

    Raises:
        ConfigError: what is wrong, in one line.
    """
    found = preflight(config)
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)
    rows = ", ".join(f"{count if count is not None else '?'} {split}" for split, count in found.rows.items())
    batch = config.batch
    typer.echo(
        f"ok: {config.name}: {rows} rows; batch {batch.initial} in [{batch.min}, {batch.max}], "
        f"policy {config.policy['name']}, lr rule {config.lr.rule}, {config.cluster.num_workers} workers"
    )


def print_schema() -> None:
    """Every key with its type, default and meaning."""
    _print_section(Config, "")
    for title, registry in (("policy", POLICIES), ("guard", GUARDS)):
        for name, factory in sorted(registry.items()):
            typer.echo(f"\n{title} {name}: {_first_line(factory)}")
            _print_keys(factory)
    typer.echo("")
    for name, rule in LR_RULES.items():
        typer.echo(f"lr.rule {name}: {_first_line(rule)}")


def _print_section(section: type[Section], prefix: str) -> None:
    for name, field in section.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, Section):
            typer.echo(f"\n{prefix}{name}: {_first_line(field.annotation)}")
            _print_section(field.annotation, f"{prefix}{name}.")
            continue
        default = (
            "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
        )
        typer.echo(f"  {prefix}{name}: {_type_name(field.annotation)}, {default}. {field.description or ''}")


def _print_keys(factory: Any) -> None:
    keys = keys_of(factory)
    hints = typing.get_type_hints(factory)
    for name, parameter in parameters(factory).items():
        empty = parameter.default is inspect.Parameter.empty
        default = "required" if empty else f"default {parameter.default!r}"
        key = keys.get(name)
        allowed = f" ({key.allowed()})" if key and key.allowed() else ""
        typer.echo(
            f"  {name}: {_type_name(hints.get(name, Any))}{allowed}, {default}. {key.doc if key else ''}"
        )


def _type_name(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if inspect.isclass(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("NoneType", "None")


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
