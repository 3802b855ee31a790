"""Candidates that do badly in the simulator are not trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ray_dynbs.config.search import Candidates
from ray_dynbs.config.simulated import simulated
from ray_dynbs.config.space import Point
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.simulator import SimulatedEpoch, World

GOAL = 2 / 3
"""Share of the base's own progress at its end that candidates are timed to."""
FILTERED = "far slower than the base in the simulator"
WORSE = 1.5
"""Time over the base's own to the same progress above which a candidate is thrown out."""


def time_to(epochs: list[SimulatedEpoch], progress: float) -> float:
    """Time until so much progress, in passes at the reference batch; infinite where it is missed."""
    return next((epoch.time_s for epoch in epochs if epoch.progress >= progress), math.inf)


def make_filter(
    candidates: Candidates, num_rows: int, unseen: list[tuple[Point, str]]
) -> Callable[[Point], bool]:
    """Whether a point is worth training.

    Args:
        candidates: The search; without ``prefilter: simulate`` every point is.
        num_rows: Rows in a pass.
        unseen: Takes the points that are not, with :data:`FILTERED` for a reason.

    Raises:
        ConfigError: a key of the search's ``world`` is none of the simulator's, or out of range.
    """
    search = candidates.search
    if search.prefilter == "none":
        return lambda _: True
    numbers: dict[str, Any] = {"num_rows": num_rows, **search.world}
    try:
        world = World(**numbers)
    except TypeError as error:
        raise ConfigError(f"world: {error}; `ray-dynbs simulate CONFIG --world help` lists them") from error
    of_base = simulated(candidates.base, world)
    goal = GOAL * of_base[-1].progress
    limit = WORSE * time_to(of_base, goal)

    def accept(point: Point) -> bool:
        good = time_to(simulated(candidates.at(point), world), goal) <= limit
        if not good:
            unseen.append((point, FILTERED))
        return good

    return accept
