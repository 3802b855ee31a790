"""Typed, documented, range-checked parameters of policies, guards and LR rules.

A component is a keyword-only frozen dataclass (or any function) whose parameters carry a
:class:`Key`. The range is checked where the component is built, so that Python callers and
configuration files meet the same rule and the same message; the configuration layer adds the
types, the names and the printed schema from the very same annotations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray_dynbs.core.errors import ConfigError


@dataclass(frozen=True)
class Key:
    """Meaning and range of one parameter, used as ``Annotated[float, Key("...", gt=0)]``."""

    doc: str
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def allowed(self) -> str:
        """The range in words, for error messages and the schema; empty where anything goes."""
        signs = (("> ", self.gt), (">= ", self.ge), ("< ", self.lt), ("<= ", self.le))
        return " and ".join(f"{sign}{bound:g}" for sign, bound in signs if bound is not None)

    def admits(self, value: float) -> bool:
        """Whether a number is finite and inside the range."""
        return math.isfinite(value) and not (
            (self.gt is not None and not value > self.gt)
            or (self.ge is not None and not value >= self.ge)
            or (self.lt is not None and not value < self.lt)
            or (self.le is not None and not value <= self.le)
        )


@functools.cache
def keys_of(component: Callable[..., Any]) -> dict[str, Key]:
    """The :class:`Key` of every annotated parameter of a dataclass or function."""
    found = {}
    for name, hint in typing.get_type_hints(component, include_extras=True).items():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, Key):
                found[name] = extra
    return found


def check_ranges(component: Any) -> None:
    """Check every numeric field of a dataclass instance against its :class:`Key`.

    Raises:
        ConfigError: a number is not finite or outside its range; names the component, the field,
            the value found and the range allowed.
    """
    factory: Callable[..., Any] = type(component)
    keys = keys_of(factory)
    for field in dataclasses.fields(component):
        value = getattr(component, field.name)
        key = keys.get(field.name)
        if key is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not key.admits(value):
            raise ConfigError(
                f"{type(component).__name__}.{field.name} is {value}; allowed: {key.allowed() or 'finite'}"
            )


_PLAIN = (bool, int, float, str, type(None))


@functools.cache
def _plain_types(kind: type) -> dict[str, tuple[type, ...]]:
    """The fields of a dataclass that hold plain values, and which."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        members = typing.get_args(hint) or (hint,)
        if all(member in _PLAIN for member in members):
            found[name] = tuple(members)
    return found


def typed(kind: type, data: Any) -> dict[str, Any]:
    """Fields of a dataclass as they were read from somewhere, seen to be of their types.

    Args:
        kind: The dataclass; fields that hold more than plain values are not looked at.
        data: What was read.

    Raises:
        TypeError: it is no mapping, or a field is of another type; names it.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"{kind.__name__} is {data!r}")
    for name, allowed in _plain_types(kind).items():
        value = data.get(name)
        exact = type(value) in allowed or (type(value) is int and float in allowed)
        if name in data and not exact:
            raise TypeError(f"{name} is {value!r}")
    return dict(data)
