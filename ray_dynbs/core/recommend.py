"""From what a probe has measured to the sizes it recommends, with the reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_dynbs.core.estimators.estimate import Estimate
from ray_dynbs.core.plan import BatchPlan

SURE = 0.5
"""Relative error up to which a noise scale is worth following."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a probe has found out.

    Attributes:
        largest: Most rows that fit in one forward/backward on every rank.
        fills_memory: Whether it is memory that sets this limit, and not the configuration.
        knee: The smallest size within 5 % of the best speed.
        noise_scale: As training begins, rows; ``None`` where it was not measured.
        class_floor: Smallest batch that shows every class; ``None`` without such a guard.
        initial: The configured initial batch.
        bounds: Smallest and largest batch allowed.
        num_rows: Rows in one pass.
        world_size: Data-parallel ranks.
    """

    largest: int
    fills_memory: bool
    knee: int
    noise_scale: Estimate | None
    class_floor: int | None
    initial: int
    bounds: tuple[int, int]
    num_rows: int
    world_size: int


def recommend(measured: Measured) -> tuple[BatchPlan, tuple[str, ...]]:
    """The plan to begin with, and why.

    The global batch follows the noise scale where that is known to :data:`SURE`, else it stays; the
    micro-batch is the smallest that is as fast as any, since what is larger only takes memory.
    """
    reasons: list[str] = []
    size = _followed(measured, reasons)
    low, high = measured.bounds[0], min(measured.bounds[1], measured.num_rows)
    if measured.class_floor is not None and size < measured.class_floor:
        reasons.append(f"{size} -> {measured.class_floor}: the smallest batch that shows every class")
        size = measured.class_floor
    if not low <= size <= high:
        inside = min(max(size, low), high)
        reasons.append(f"{size} -> {inside}: the bounds are {low} to {high}")
        size = inside
    ceiling = min(measured.knee, measured.largest)
    plan = BatchPlan.fit(size, measured.world_size, ceiling)
    if plan.micro_batch_size < plan.largest_share:
        why = "no more fit" if measured.fills_memory else "no more were allowed"
        why = "as fast as any that fit" if ceiling == measured.knee < measured.largest else why
        reasons.append(f"micro-batches of at most {ceiling} rows: {why}")
    else:
        reasons.append(f"a share of {plan.largest_share} rows fits in one forward")
    return plan, tuple(reasons)


def _followed(measured: Measured, reasons: list[str]) -> int:
    noise = measured.noise_scale
    if noise is None:
        reasons.append(f"batch.initial {measured.initial}: the noise scale was not measured")
        return measured.initial
    if not math.isfinite(noise.value) or noise.relative_error > SURE:
        reasons.append(f"batch.initial {measured.initial}: the gradient is lost in noise so far")
        return measured.initial
    size = max(round(noise.value), 1)
    reasons.append(f"the noise scale is {size} rows (+- {noise.relative_error:.0%}) as training begins")
    return size
