"""The space of a search: keys of a configuration, and the values that each may take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from ray_dynbs.config.sections import Section
from ray_dynbs.core.errors import ConfigError

Point = dict[str, Any]
"""Key of a configuration -> value: one candidate."""
Kind = Literal["choice", "grid", "uniform", "loguniform", "int", "logint"]


class Domain(Section):
    """Values of one key: exactly one of the kinds."""

    choice: list[Any] | None = Field(None, min_length=1, description="one of these, at random")
    grid: list[Any] | None = Field(None, min_length=1, description="each of these")
    uniform: list[float] | None = Field(None, description="[low, high], evenly")
    loguniform: list[float] | None = Field(None, description="[low, high], evenly in the logarithm")
    int_: list[int] | None = Field(None, alias="int", description="[low, high], whole numbers, both included")
    logint: list[int] | None = Field(None, description="the same, evenly in the logarithm")
    when: dict[str, Any] | None = Field(
        None, description="only where these keys have these values, or one of a list of them"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Domain:
        given = [name for name in KINDS if self.values_of(name) is not None]
        if len(given) != 1:
            raise ConfigError(f"{given or 'nothing'} given; allowed: exactly one of {', '.join(KINDS)}")
        if self.kind in ("choice", "grid"):
            return self
        values = self.values
        if any(not abs(value) <= MOST for value in values):
            raise ConfigError(f"{self.kind} is {values}; allowed: numbers of at most {MOST:g}")
        if len(values) != 2 or not values[0] < values[1]:
            raise ConfigError(f"{self.kind} is {values}; allowed: [low, high] with low below high")
        if self.kind in ("loguniform", "logint") and not values[0] > 0:
            raise ConfigError(f"{self.kind} is {values}; allowed: above 0")
        return self

    def values_of(self, kind: str) -> list[Any] | None:
        """What is given for a kind."""
        found: list[Any] | None = getattr(self, "int_" if kind == "int" else kind)
        return found

    @property
    def kind(self) -> Kind:
        """Which one it is."""
        return next(name for name in KINDS if self.values_of(name) is not None)

    @property
    def values(self) -> list[Any]:
        """The values to choose from, or the two ends."""
        return self.values_of(self.kind) or []

    def applies(self, point: Mapping[str, Any]) -> bool:
        """Whether its condition holds at a point, all other keys included."""
        for key, wanted in (self.when or {}).items():
            if point.get(key) not in (wanted if isinstance(wanted, list) else [wanted]):
                return False
        return True

    def example(self) -> Point:
        """Keys and values under which its condition holds."""
        each = (self.when or {}).items()
        return {key: wanted[0] if isinstance(wanted, list) else wanted for key, wanted in each}

    def draw(self, rng: np.random.Generator) -> Any:
        """A value at random."""
        if self.kind in ("choice", "grid"):
            return self.values[int(rng.integers(len(self.values)))]
        low, high = self.values
        if self.kind == "uniform":
            return float(rng.uniform(low, high))
        if self.kind == "loguniform":
            return float(math.exp(rng.uniform(math.log(low), math.log(high))))
        if self.kind == "int":
            return int(rng.integers(low, high + 1))
        return min(int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))), high)


MOST = 2.0**53
"""Beyond it whole numbers are not exact, and ranges make no sense."""
KINDS: tuple[Kind, ...] = ("choice", "grid", "uniform", "loguniform", "int", "logint")
Space = Mapping[str, Domain]


def in_order(space: Space) -> list[str]:
    """The keys, each after those that its condition names.

    Raises:
        ConfigError: conditions that go round in circles.
    """
    left, found = list(space), []
    while left:
        ready = [key for key in left if not (set(space[key].when or {}) & set(left))]
        if not ready:
            raise ConfigError(f"space: the conditions of {', '.join(left)} depend on each other")
        found += ready
        left = [key for key in left if key not in ready]
    return found


def draw_points(space: Space, base: Mapping[str, Any], number: int, seed: int) -> list[Point]:
    """Candidates at random; every combination of the grids, each ``number`` times, where there are grids.

    Args:
        space: The space.
        base: Flattened keys of the base, for conditions on keys outside of the space.
        number: How many.
        seed: Of the draw.
    """
    rng = np.random.default_rng(seed)
    points: list[Point] = []
    for combination in grid_combinations(space, base) * number:
        point = dict(combination)
        for key in in_order(space):
            domain = space[key]
            if domain.kind != "grid" and domain.applies({**base, **point}):
                point[key] = domain.draw(rng)
        points.append(point)
    return points


def grid_combinations(space: Space, base: Mapping[str, Any]) -> list[Point]:
    """Every combination of the grids' values whose conditions hold; one empty one where there are none."""
    keys = [key for key in in_order(space) if space[key].kind == "grid"]
    found: list[Point] = []
    for values in itertools.product(*(space[key].values for key in keys)):
        point = dict(zip(keys, values, strict=True))
        kept = {key: value for key, value in point.items() if space[key].applies({**base, **point})}
        if kept not in found:
            found.append(kept)
    return found


def flattened(data: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as one, ``section.key`` -> value."""
    if not isinstance(data, Mapping) or not data:
        return {path: data}
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= flattened(value, f"{path}.{key}" if path else str(key))
    return found


def corners(space: Space) -> Sequence[Point]:
    """Every value that a key may begin or end with, one at a time; conditions aside."""
    return [{key: value} for key, domain in space.items() for value in domain.values]
