"""``ray-dynbs check``: is this configuration going to train, and which keys are there."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import typer
from pydantic.fields import FieldInfo

from ray_dynbs.config import Config
from ray_dynbs.config.components import parameters
from ray_dynbs.config.sections import Section
from ray_dynbs.core.errors import ConfigError
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
    known = ", ".join(f"{count} {split}" for split, count in found.rows.items() if count is not None)
    rows = f"{known} rows" if known else "rows known once its pipeline runs"
    batch = config.batch
    typer.echo(
        f"ok: {config.name}: {rows}; batch {batch.initial} in [{batch.min}, {batch.max}], "
        f"policy {config.policy['name']}, lr rule {config.lr.rule}, {config.cluster.workers_text} workers"
    )
    if found.recomputed:
        layers = ", ".join(f"{count} {name}" for name, count in found.recomputed.items())
        typer.echo(f"activations computed again in the backward: {layers}")


def print_platform() -> None:
    """This machine's devices, memory, limits and precisions, and what a run would use of them."""
    from ray_dynbs.training.platform import describe_platform

    found = describe_platform()
    width = max(len(name) for name, _ in found)
    for name, words in found:
        typer.echo(f"{name:<{width}}  {words}")


def print_schema(beginning: str = "") -> None:
    """Every key with its type, range, default and meaning.

    Args:
        beginning: Only the sections, policies, guards and rules whose name begins like this.

    Raises:
        ConfigError: none does.
    """
    lines: list[str] = []
    _collect(lines.append)
    if not beginning:
        typer.echo("\n".join(lines))
        return
    blocks = "\n".join(lines).split("\n\n")
    words = beginning.split(".")
    found = [block for block in blocks if words[0] in block.partition(":")[0].split()]
    keys = [line for block in blocks for line in block.splitlines() if line.strip().startswith(beginning)]
    if not found and not keys:
        raise ConfigError(f"--schema {beginning!r}: no key, policy, guard or rule begins like this")
    typer.echo("\n\n".join(found) or "\n".join(keys))


def _collect(echo: Callable[[str], Any]) -> None:
    echo("Keys of a configuration\n")
    _print_section(Config, "", echo)
    for title, registry in (("policy", POLICIES), ("guard", GUARDS)):
        for name, factory in sorted(registry.items()):
            echo(f"\n{title} {name}: {_first_line(factory)}")
            _print_keys(factory, echo)
    echo("")
    for name, rule in LR_RULES.items():
        echo(f"lr.rule {name}: {_first_line(rule)}")


def _print_section(section: type[Section], prefix: str, echo: Callable[[str], Any]) -> None:
    """A section's own keys, then the sections in it."""
    inner = {}
    for name, field in section.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, Section):
            inner[name] = field.annotation
            continue
        default = ... if field.is_required() else field.get_default(call_default_factory=True)
        limits = _limits(field.metadata) or _limits(typing.get_args(field.annotation))
        kind_name = _type_name(field.annotation)
        echo(_key_line(f"{prefix}{name}", kind_name, limits, default, field.description or ""))
    for name, kind in inner.items():
        echo(f"\n{prefix}{name}: {_first_line(kind)}")
        _print_section(kind, f"{prefix}{name}.", echo)


def _print_keys(factory: Any, echo: Callable[[str], Any]) -> None:
    hints = typing.get_type_hints(factory)
    for name, parameter in parameters(factory).items():
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        key = keys_of(factory).get(name)
        limits, doc = (key.allowed(), key.doc) if key else ("", "")
        echo(_key_line(name, _type_name(hints.get(name, Any)), limits, default, doc))


def _key_line(name: str, kind: str, limits: str, default: Any, doc: str) -> str:
    given = "required" if default is ... else f"default {'null' if default is None else default}"
    return f"  {name}: {kind}{' ' + limits if limits else ''}; {given}. {doc}"


def _type_name(annotation: Any) -> str:
    """A type as someone who writes YAML would say it."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(value) for value in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(_type_name(part) for part in typing.get_args(annotation))
    names = {int: "whole number", float: "number", str: "text", bool: "true | false", type(None): "null"}
    if annotation in names:
        return names[annotation]
    return {dict: "mapping", list: "list"}.get(typing.get_origin(annotation) or annotation, str(annotation))


def _limits(metadata: Any) -> str:
    """The ranges among a field's metadata, also where the type itself carries them."""
    found = []
    for item in metadata:
        found += [_limits(item.__metadata__)] if hasattr(item, "__metadata__") else []
        found += [_limits(item.metadata)] if isinstance(item, FieldInfo) else []
        signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        found += [f"{sign} {getattr(item, name)}" for name, sign in signs if hasattr(item, name)]
    return " and ".join(text for text in found if text)


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
