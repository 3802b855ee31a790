"""Policies and guards from their configuration: a name, or an import path, and keys.

The keys' types and meanings come from the component's own signature, so a user's policy is checked
like a built-in one.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from ray_dynbs.config.errors import explain, nearest
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.guards import GUARDS
from ray_dynbs.core.policies import POLICIES
from ray_dynbs.core.policy import Policy

FROM_ELSEWHERE = {"memory_vote": "memory.vote"}
"""Parameters that a section of the configuration gives, not the component's own keys."""


def build_policy(spec: Mapping[str, Any], *, memory_vote: str) -> Policy:
    """The policy of the ``policy`` section.

    Raises:
        ConfigError: unknown name or key, wrong type or range.
    """
    return _build("policy", POLICIES, spec, {"memory_vote": memory_vote})


def build_guards(specs: Sequence[Mapping[str, Any]]) -> list[Policy]:
    """The guards of the ``guards`` section, in order.

    Raises:
        ConfigError: unknown name or key, wrong type or range.
    """
    return [_build(f"guards.{index}", GUARDS, spec, {}) for index, spec in enumerate(specs)]


def with_defaults(registry: Mapping[str, Callable[..., Any]], spec: Mapping[str, Any]) -> dict[str, Any]:
    """A built-in component's section with its defaults written out, so that a record is complete."""
    factory = registry.get(str(spec.get("name")))
    if factory is None:
        return dict(spec)
    known = {key: p.default for key, p in parameters(factory).items() if p.default is not p.empty}
    return {"name": spec["name"], **known, **spec}


def parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keys a component takes from its own section."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    signature = inspect.signature(factory)
    return {n: p for n, p in signature.parameters.items() if n not in FROM_ELSEWHERE and p.kind in named}


def _build(
    where: str, registry: Mapping[str, Callable[..., Any]], spec: Mapping[str, Any], given: Mapping[str, Any]
) -> Policy:
    keys = dict(spec)
    name = keys.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"{where}.name is {name!r}; allowed: {', '.join(sorted(registry))} or an import path"
        )
    factory = registry.get(name) or _imported(where, name, registry)
    values = _typed(where, name, factory, keys)
    wanted = inspect.signature(factory).parameters
    values |= {key: value for key, value in given.items() if key in wanted}
    try:
        component = factory(**values)
    except ConfigError as error:
        of_key = f"{getattr(factory, '__name__', name)}."  # a key of its own, which has a place in the file
        told = str(error)
        said = f"{where}.{told.removeprefix(of_key)}" if told.startswith(of_key) else f"{where}: {told}"
        raise ConfigError(said) from error
    except Exception as error:  # a user's own code may raise anything
        raise ConfigError(f"{where}: {name} failed: {_one_line(error)}") from error
    for method in ("init", "update"):
        if not callable(getattr(component, method, None)):
            raise ConfigError(f"{where}.name is {name!r}, whose result has no {method}(); see core/policy.py")
    return typing.cast(Policy, component)


def _imported(where: str, name: str, registry: Mapping[str, Any]) -> Callable[..., Any]:
    allowed = f"allowed: {', '.join(sorted(registry))} or an import path"
    module_name, _, attribute = name.replace(":", ".").rpartition(".")
    if not module_name:
        raise ConfigError(f"{where}.name is {name!r}{nearest(name, registry)}; {allowed}")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # a user's own module may do anything while it is imported
        reason = _one_line(error)
        raise ConfigError(f"{where}.name is {name!r}, which does not import: {reason}; {allowed}") from error
    if not callable(found):
        raise ConfigError(f"{where}.name is {name!r}, a {type(found).__name__}; allowed: a function or class")
    return typing.cast(Callable[..., Any], found)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _typed(where: str, name: str, factory: Callable[..., Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with their types checked against the factory's signature."""
    try:
        hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except (NameError, TypeError):  # annotations that only exist for type checkers
        hints = {}
    fields: dict[str, Any] = {}
    for key, parameter in parameters(factory).items():
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[key] = (hints.get(key, Any), default)
    config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)
    model = create_model(name.rpartition(".")[2], __config__=config, **fields)
    try:
        checked = model.model_validate(dict(keys))
    except ValidationError as error:
        raise ConfigError(explain(error, where=where, names=fields)) from error
    return {key: getattr(checked, key) for key in keys}
