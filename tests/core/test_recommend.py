"""What a probe recommends, and why."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ray_dynbs.core.estimators.estimate import Estimate
from ray_dynbs.core.recommend import Measured, recommend

USUAL: dict[str, Any] = {
    "largest": 64,
    "fills_memory": True,
    "knee": 16,
    "noise_scale": Estimate(100.4, 0.1),
    "class_floor": None,
    "initial": 32,
    "bounds": (8, 512),
    "num_rows": 10_000,
    "world_size": 2,
}


@pytest.mark.parametrize(
    ("changes", "sizes", "reason"),
    [
        ({}, (100, 16, 4), "the noise scale is 100 rows (+- 10%)"),
        ({"knee": 64}, (100, 50, 1), "a share of 50 rows fits in one forward"),
        ({"largest": 12, "knee": 12}, (100, 12, 5), "micro-batches of at most 12 rows: no more fit"),
        ({"largest": 12, "knee": 12, "fills_memory": False}, (100, 12, 5), "12 rows: no more were allowed"),
        ({}, (100, 16, 4), "micro-batches of at most 16 rows: as fast as any that fit"),
        ({"noise_scale": None}, (32, 16, 1), "batch.initial 32: the noise scale was not measured"),
        ({"noise_scale": Estimate(100.0, 0.6)}, (32, 16, 1), "lost in noise"),
        ({"noise_scale": Estimate(math.inf, math.inf)}, (32, 16, 1), "lost in noise"),
        ({"class_floor": 120}, (120, 16, 4), "100 -> 120: the smallest batch that shows every class"),
        ({"bounds": (8, 64)}, (64, 16, 2), "100 -> 64: the bounds are 8 to 64"),
        ({"num_rows": 50}, (50, 16, 2), "100 -> 50: the bounds are 8 to 50"),
        ({"bounds": (200, 512)}, (200, 16, 7), "100 -> 200"),
        ({"noise_scale": Estimate(0.2, 0.1)}, (8, 4, 1), "1 -> 8"),
    ],
)
def test_sizes_and_reasons(changes: dict[str, Any], sizes: tuple[int, int, int], reason: str) -> None:
    plan, reasons = recommend(Measured(**{**USUAL, **changes}))
    assert (plan.global_batch_size, plan.micro_batch_size, plan.grad_accum_steps) == sizes
    assert any(reason in each for each in reasons)
