"""What follows from a configuration as a whole."""

from __future__ import annotations

from ray_dynbs.config.schema import LoopSettings


def test_what_the_policy_would_shrink_above_is_left_free() -> None:
    base = {"batch": {"initial": 16}}
    assert LoopSettings.model_validate(base).headroom == (
        0.2,
        "20% is left free, since policy.memory_high is 0.8 (memory.headroom 0.1)",
    )
    for changes, expected in (
        ({"policy": {"name": "fixed"}}, 0.1),
        ({"policy": {"name": "threshold", "memory_high": 0.95}}, 0.1),
        ({"memory": {"headroom": 0.3}}, 0.3),
    ):
        assert LoopSettings.model_validate(base | changes).headroom == (expected, "")
