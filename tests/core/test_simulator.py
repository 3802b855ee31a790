"""The simulated world: the same decisions for the same seed, sizes where theory puts them, fast enough."""

from __future__ import annotations

from typing import Any

import pytest

from ray_dynbs.core.cadence import Cadence
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators.step_time import StepTimeModel, best_batch_of_a_line
from ray_dynbs.core.manager import DynamicBatchSizeManager
from ray_dynbs.core.policies import Fixed, FollowNoiseScale, Goodput
from ray_dynbs.core.simulator import World, simulate

STILL = World(noise_scale_start=400, noise_scale_end=400, grad_norm_start=1, grad_norm_end=1)


def run(policy: Any, world: World, epochs: int = 40, world_size: int = 4, seed: int = 0) -> Any:
    return simulate(
        lambda ranks: DynamicBatchSizeManager(
            32, 8192, 8, policy=policy, world_size=ranks, reference_batch_size=32
        ),
        world,
        epochs=epochs,
        world_size=world_size,
        seed=seed,
    )


def test_it_is_a_function_of_its_seed() -> None:
    assert run(FollowNoiseScale(), World()) == run(FollowNoiseScale(), World())
    assert run(FollowNoiseScale(), World()) != run(FollowNoiseScale(), World(), seed=1)


def test_a_still_noise_scale_is_reached_and_a_rising_one_followed() -> None:
    assert run(FollowNoiseScale(), STILL)[-1].global_batch_size == pytest.approx(400, rel=0.15)
    epochs = run(FollowNoiseScale(), World())
    for epoch in epochs[8:18]:
        assert epoch.global_batch_size == pytest.approx(epoch.noise_scale, rel=0.6)


def test_goodput_finds_the_best_size_of_a_line() -> None:
    world = World(
        noise_scale_start=400,
        noise_scale_end=400,
        grad_norm_start=1,
        grad_norm_end=1,
        step_time=StepTimeModel(alpha_c=0.1, beta_c=0.001),
    )
    best = best_batch_of_a_line(400, 0.1, 0.001)
    found = run(Goodput(), world, world_size=1)[-1].global_batch_size
    assert best / 1.9 <= found <= best * 1.9  # the curve is flat: 5 % spans that much


def test_progress_is_what_the_noise_scale_says() -> None:
    fixed = run(Fixed(), STILL, epochs=5)
    assert [epoch.progress for epoch in fixed] == pytest.approx([1, 2, 3, 4, 5])
    assert fixed[0].steps == -(-50_000 // 32)
    assert fixed[-1].time_s == pytest.approx(5 * fixed[0].steps * (0.02 + 0.0005 * 8))
    assert run(FollowNoiseScale(), STILL)[-1].progress < 40


def test_decisions_within_a_pass_are_made_when_they_are_due() -> None:
    """Every 500 rows of 1,300: after 512, 1,024 and at the pass's end; the journal of sizes says so."""
    world = World(num_rows=1_300)
    seen: list[tuple[int, int]] = []

    class Spy(DynamicBatchSizeManager):
        def decide(self, signal: Any) -> Any:
            seen.append((signal.rows, signal.step))
            return super().decide(signal)

    epochs = simulate(lambda ranks: Spy(32, policy=Fixed()), world, epochs=2, cadence=Cadence(samples=500))
    assert seen == [(512, 16), (512, 32), (276, 41), (512, 57), (512, 73), (276, 82)]
    assert [epoch.steps for epoch in epochs] == [41, 41]
    faster = simulate(
        lambda ranks: DynamicBatchSizeManager(32, 8192, 8, policy=FollowNoiseScale(), world_size=4),
        World(),
        epochs=1,
        world_size=4,
        cadence=Cadence(steps=100),
    )
    assert faster[0].global_batch_size > 100


def test_a_world_of_impossible_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"noise_scale_end is -1\.0; allowed: >= 1e-09"):
        World(noise_scale_end=-1.0)
