"""The contract of every policy and guard, and what each one says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators import Estimate, Estimates, PieceSums
from ray_dynbs.core.guards import (
    GUARDS,
    Clamp,
    ClassCoverage,
    Cooldown,
    DataCeiling,
    DeadBand,
    GrowthLimit,
    Quantise,
    WarmupHold,
)
from ray_dynbs.core.manager import DynamicBatchSizeManager
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.core.policies import (
    POLICIES,
    Fixed,
    FollowNoiseScale,
    Goodput,
    NormTest,
    Plateau,
    Schedule,
    Threshold,
)
from ray_dynbs.core.policy import Policy, Proposal, View
from ray_dynbs.core.signal import Signal

POLICY_CASES: dict[str, Policy] = {
    "fixed": Fixed(),
    "threshold": Threshold(),
    "threshold relative": Threshold(relative=True, relative_window=3),
    "noise_scale": FollowNoiseScale(),
    "goodput": Goodput(),
    "norm_test": NormTest(),
    "norm_test unbiased": NormTest(unbiased=True, eta=0.3),
    "plateau": Plateau(),
    "plateau trend": Plateau(trend=True, patience=1),
    "schedule": Schedule(stages=[[0, 16], [3, 8], [5, 32]]),
    "schedule ramp": Schedule(stages=[[1, 20], [4, 90]], unit="epochs", ramp=True),
    "threshold shrink": Threshold(memory_vote="shrink"),
    "threshold sketch": Threshold(memory_vote="shrink", memory_grows=True),
}
GUARD_CASES: dict[str, Policy] = {
    "clamp": Clamp(min=4, max=64),
    "cooldown": Cooldown(decisions=2),
    "dead_band": DeadBand(fraction=0.2),
    "growth_limit": GrowthLimit(factor=1.5),
    "class_coverage": ClassCoverage(class_counts=[3, 2, 1]),
    "data_ceiling": DataCeiling(fraction=0.5),
    "quantise": Quantise(powers_of_two=True),
    "warmup_hold": WarmupHold(epochs=1),
}
numbers = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 20)


extreme = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1e30, 1e30) | st.floats(0, 100)
pieces = st.builds(PieceSums, st.integers(0, 5), extreme, extreme, extreme, extreme, extreme, st.booleans())


@st.composite
def signals(draw: st.DrawFn) -> dict[str, Any]:
    steps = draw(st.integers(0, 10))
    return {
        "epochs_seen": draw(st.floats(0, 10)),
        "num_steps": steps,
        "num_finite_steps": draw(st.integers(0, steps)),
        "grad_norm": draw(numbers),
        "memory_fraction": draw(numbers),
        "train_loss": draw(numbers),
        "val_loss": draw(numbers),
        "samples_seen": draw(st.integers(0, 8)),
        "pieces": draw(st.none() | pieces),
        "step_time_s": draw(numbers),
    }


LEAPS = {"goodput", "norm_test", "norm_test unbiased", "schedule", "schedule ramp"}
"""What may go to its size in one move: put a growth_limit behind it to keep it from that."""


def test_every_registered_piece_has_a_case() -> None:
    assert set(POLICIES) <= set(POLICY_CASES)
    assert set(GUARDS) == set(GUARD_CASES)


@pytest.mark.parametrize("policy", POLICY_CASES)
@pytest.mark.parametrize("guard", GUARD_CASES)
@settings(max_examples=8)
@given(drawn=st.lists(signals(), max_size=8), split=st.integers(0, 8), world_size=st.integers(1, 5))
def test_contract(policy: str, guard: str, drawn: list[dict[str, Any]], split: int, world_size: int) -> None:
    """Bounds kept, one move of a factor two, JSON round trip and world-size change mid-run."""

    def manager() -> DynamicBatchSizeManager:
        return DynamicBatchSizeManager(16, 128, 2, policy=POLICY_CASES[policy], guards=[GUARD_CASES[guard]])

    straight, resumed = manager(), manager()
    for index, fields in enumerate(drawn):
        if index == split:
            saved = json.loads(json.dumps(resumed.state_dict(), allow_nan=False))
            resumed = manager()
            resumed.load_state_dict(saved)
        before = straight.get_current_batch_size()
        signal = Signal.measured(plan_version=straight.version, step=index, **fields)
        decision = straight.decide(signal)
        assert resumed.decide(signal) == decision
        size = decision.plan.global_batch_size
        assert 2 <= size <= 128
        if policy not in LEAPS and guard != "class_coverage":
            assert before // 2 <= size <= before * 2
        assert math.isfinite(decision.lr_scale)
        assert decision.reasons
        if (
            not signal.num_finite_steps
            or {"grad_norm", "train_loss", "val_loss"} & dict(signal.missing).keys()
        ):
            assert size <= before
    cut = straight.start(world_size=world_size)
    assert cut.plan.global_batch_size == straight.get_current_batch_size()
    assert cut.plan.world_size == world_size


def view(size: int = 32, micro: int | None = None, since: int | None = None, **fields: Any) -> View:
    signal = Signal.measured(num_steps=1, num_finite_steps=1, **fields)
    return View(signal=signal, plan=BatchPlan.fit(size, 1, micro), decisions_since_change=since)


def propose(piece: Policy, seen: View, size: int | None = None, state: Any = None) -> Proposal:
    start = Proposal(size or seen.plan.global_batch_size, seen.plan.micro_batch_size)
    return piece.update(start, state, seen)[0]


@pytest.mark.parametrize(
    ("grad_norm", "size"), [(10.01, 16), (10.0, 32), (1.0, 32), (0.1, 32), (0.09, 64), (0.0, 64), (None, 32)]
)
def test_threshold_gradient_vote(grad_norm: float | None, size: int) -> None:
    assert propose(Threshold(), view(grad_norm=grad_norm)).global_batch_size == size


@pytest.mark.parametrize("grad_norm", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("memory", [0.1, 0.5, 0.99])
def test_by_default_memory_never_changes_the_global_batch(grad_norm: float, memory: float) -> None:
    with_memory = propose(Threshold(), view(grad_norm=grad_norm, memory_fraction=memory))
    without = propose(Threshold(), view(grad_norm=grad_norm))
    assert with_memory.global_batch_size == without.global_batch_size
    assert with_memory.micro_ceiling == (16 if memory > 0.8 else 32)


def test_high_memory_halves_the_micro_batch_only_while_that_helps() -> None:
    policy = Threshold()
    proposal, state = policy.update(Proposal(32, 32), None, view(grad_norm=1.0, memory_fraction=0.95))
    assert proposal.micro_ceiling == 16
    lower, lower_state = policy.update(
        Proposal(32, 16), state, view(micro=16, grad_norm=1.0, memory_fraction=0.9)
    )
    assert lower.micro_ceiling == 8
    assert lower_state["halved_at"] == 0.9
    same, _ = policy.update(Proposal(32, 16), state, view(micro=16, grad_norm=1.0, memory_fraction=0.95))
    assert same.micro_ceiling == 16
    assert "did not lower it" in same.reasons[-1]
    assert policy.update(Proposal(32, 1), None, view(micro=1, memory_fraction=0.9))[0].micro_ceiling == 1


@pytest.mark.parametrize(
    ("grad_norm", "memory", "grows", "size"),
    [
        (1.0, 0.81, False, 16),  # memory alone shrinks
        (0.05, 0.9, False, 16),  # a shrink vote wins over a grow vote
        (20.0, 0.9, False, 16),  # two shrink votes are one move
        (0.05, 0.3, False, 64),  # growth with room
        (0.05, 0.5, False, 32),  # growth needs memory below memory_low
        (0.05, None, False, 32),  # unknown memory is not room
        (1.0, 0.3, False, 32),  # low memory is no vote of its own
        (1.0, 0.3, True, 64),  # unless it is told to be
        (0.05, 0.3, True, 64),  # two grow votes are one move
        (20.0, 0.3, True, 16),  # and a shrink vote still wins
    ],
)
def test_threshold_with_a_memory_vote(grad_norm: float, memory: float | None, grows: bool, size: int) -> None:
    policy = Threshold(memory_vote="shrink", memory_grows=grows)
    assert propose(policy, view(grad_norm=grad_norm, memory_fraction=memory)).global_batch_size == size


@pytest.mark.parametrize(
    "keys",
    [
        {"grad_norm_low": 10.0, "grad_norm_high": 1.0},
        {"grad_norm_high": 0.0},
        {"grad_norm_low": float("nan")},
        {"memory_low": 0.9},
        {"memory_high": 1.5},
        {"memory_grows": True},
        {"memory_vote": "shrnk"},
    ],
)
def test_threshold_refuses_what_can_never_work(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        Threshold(**keys)


def test_fixed_never_moves() -> None:
    assert propose(Fixed(), view(grad_norm=1e9, memory_fraction=1.0)).global_batch_size == 32


@pytest.mark.parametrize(("wanted", "size"), [(100, 64), (1, 4), (32, 32)])
def test_clamp_keeps_the_bounds_and_names_both_numbers(wanted: int, size: int) -> None:
    proposal = propose(Clamp(min=4, max=64), view(), wanted)
    assert proposal.global_batch_size == size
    assert proposal.reasons == (() if wanted == size else (proposal.reasons[0],))
    assert wanted == size or f"{wanted} -> {size}" in proposal.reasons[0]


@pytest.mark.parametrize(("since", "size"), [(None, 64), (0, 32), (1, 32), (2, 64)])
def test_cooldown(since: int | None, size: int) -> None:
    assert propose(Cooldown(decisions=2), view(since=since), 64).global_batch_size == size


@pytest.mark.parametrize(("wanted", "size"), [(35, 32), (36, 36), (29, 32), (28, 28)])
def test_dead_band(wanted: int, size: int) -> None:
    assert propose(DeadBand(fraction=0.1), view(), wanted).global_batch_size == size


@pytest.mark.parametrize(("start", "wanted", "size"), [(32, 100, 48), (32, 40, 40), (32, 1, 1), (1, 9, 2)])
def test_growth_limit(start: int, wanted: int, size: int) -> None:
    assert propose(GrowthLimit(factor=1.5), view(start), wanted).global_batch_size == size


@pytest.mark.parametrize(("seen", "size"), [(0.5, 32), (1.99, 32), (2.0, 64)])
def test_warmup_hold(seen: float, size: int) -> None:
    assert propose(WarmupHold(epochs=2), view(epochs_seen=seen), 64).global_batch_size == size


@pytest.mark.parametrize(
    ("guard", "keys"),
    [
        (Clamp, {"min": 9, "max": 8}),
        (Clamp, {"min": 0, "max": 8}),
        (Cooldown, {"decisions": -1}),
        (DeadBand, {"fraction": 1.0}),
        (GrowthLimit, {"factor": 1.0}),
        (WarmupHold, {"epochs": -1}),
    ],
)
def test_guards_refuse_values_out_of_range(guard: Any, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        guard(**keys)


def test_plateau_compares_like_with_like() -> None:
    """A training loss that falls, with a lower validation loss now and then: nothing stands still."""
    manager, train = DynamicBatchSizeManager(32, policy=Plateau(patience=2)), 2.0
    for number in range(30):
        train *= 0.97
        validated = {"val_loss": train - 0.4} if number % 4 == 3 else {}
        signal = Signal.measured(
            plan_version=manager.version, num_steps=9, num_finite_steps=9, train_loss=train, **validated
        )
        assert manager.decide(signal).plan.global_batch_size == 32


def test_plateau_that_is_vetoed_goes_on_waiting_and_one_at_the_ceiling_says_so() -> None:
    policy = Plateau(patience=3)
    manager = DynamicBatchSizeManager(32, 64, policy=policy, guards=[WarmupHold(epochs=5)])
    sizes, said = [], []
    for epoch in range(12):
        signal = Signal.measured(
            epochs_seen=epoch + 1.0,
            plan_version=manager.version,
            num_steps=9,
            num_finite_steps=9,
            val_loss=1.0,
        )
        decision = manager.decide(signal)
        sizes.append(decision.plan.global_batch_size)
        said.append(decision.reasons[0])
    assert sizes == [32] * 4 + [64] * 8
    assert "as large as allowed, only a smaller LR is left" in said[-1]


def test_norm_test_waits_until_it_knows_and_moves_step_by_step() -> None:
    lone = view(pieces=PieceSums.of_step(1e-6, 20.0))
    assert propose(NormTest(unbiased=True), lone).global_batch_size == 32
    wild = sum((PieceSums.of_step(g, 500.0) for g in (9.0, -8.0, 9.5, -9.9)), PieceSums.of_step(0.1, 500.0))
    assert "wait" in propose(NormTest(unbiased=True), view(pieces=wild)).reasons[0]
    known = sum((PieceSums.of_step(1.0, 900.0) for _ in range(9)), PieceSums.of_step(1.0, 900.0))
    moved = propose(NormTest(unbiased=True), view(pieces=known))
    assert moved.global_batch_size == 64
    assert "32 -> 3600 (64 for now)" in moved.reasons[0]
    assert propose(NormTest(unbiased=True, factor=1000), view(pieces=known)).global_batch_size == 3600


def test_goodput_counts_only_what_the_bounds_allow() -> None:
    """From 500 on a ceiling of 512 the gain is 2 %: not worth a change."""
    manager = DynamicBatchSizeManager(250, 512, policy=Goodput())
    pieces = sum((PieceSums.of_step(1.0, 5_000.0) for _ in range(50)), PieceSums.of_step(1.0, 5_000.0))
    sizes = []
    for _ in range(8):
        size = manager.get_current_batch_size()
        signal = Signal.measured(
            plan_version=manager.version,
            num_steps=50,
            num_finite_steps=50,
            rows=50 * size,
            step_time_s=1.0 + 0.0001 * size,
            pieces=pieces,
        )
        sizes.append(manager.decide(signal).plan.global_batch_size)
    assert sizes == [500] * 8


def test_goodput_does_not_take_the_time_of_a_short_step_for_that_of_a_full_one() -> None:
    policy = Goodput()
    signal = Signal.measured(num_steps=1, num_finite_steps=1, rows=1, step_time_s=0.001)
    seen = View(signal=signal, plan=BatchPlan.fit(256, 1))
    assert policy.update(Proposal(256), policy.init(seen.plan), seen)[1]["seen"] == []


def test_noise_scale_has_no_answer_where_the_target_vanishes() -> None:
    noise = Estimate(5e-324, 0.1)
    seen = view(pieces=PieceSums.of_step(1.0, 1.0))
    seen = replace(seen, estimates=Estimates(noise_scale=noise))
    assert propose(FollowNoiseScale(multiplier=0.1), seen).global_batch_size == 32


def test_memory_that_wavers_around_the_limit_costs_one_halving() -> None:
    manager = DynamicBatchSizeManager(512, 1024)
    for number in range(20):
        manager.update_batch_size(1.0, 0.81 if number % 2 == 0 else 0.79)
    assert manager.plan.micro_batch_size == 256
    manager.update_batch_size(1.0, 0.95)  # it rises: something new
    assert manager.plan.micro_batch_size == 128
    manager.update_batch_size(1.0, 0.5)  # and this time it helped
    manager.update_batch_size(1.0, 0.85)
    assert manager.plan.micro_batch_size == 64


@pytest.mark.parametrize(
    ("piece", "bounds", "start", "wanted", "size"),
    [
        (Quantise(powers_of_two=True), (8, 500), 256, 500, 256),
        (Quantise(powers_of_two=True), (8, 500), 256, 9_999, 256),
        (Quantise(multiple_of=64), (8, 512), 128, 9, 64),
        (Quantise(buckets=[4, 100, 900]), (8, 512), 100, 900, 100),
        (Quantise(buckets=[4, 100, 900]), (8, 512), 100, 9, 100),
    ],
)
def test_quantise_stays_within_the_bounds(
    piece: Quantise, bounds: tuple[int, int], start: int, wanted: int, size: int
) -> None:
    seen = replace(view(start), bounds=bounds)
    assert propose(piece, seen, wanted).global_batch_size == size


def test_a_reset_leaves_a_shrink_for_memory_alone_and_the_guards_the_last_word() -> None:
    base = {"epochs": 9, "task": "x", "optimizer": {"name": "sgd", "lr": 0.1}}
    batch = {"initial": 64, "decide_every": {"steps": 9}, "reset": "to_base"}
    shrinking = {**base, "batch": batch, "memory": {"vote": "shrink"}, "guards": []}
    manager = Config.model_validate(shrinking).make_manager()
    full = {"num_steps": 9, "num_finite_steps": 9, "memory_fraction": 0.97, "grad_norm": 1.0}
    sizes = []
    for ends in (False, True, False):
        signal = Signal.measured(plan_version=manager.version, ends_pass=ends, **full)
        sizes.append(manager.decide(signal).plan.global_batch_size)
    assert sizes == [32, 16, 8]
    table = {"name": "schedule", "stages": [[0.0, 128.0]]}
    left_early = {
        **base,
        "batch": batch,
        "policy": table,
        "guards": [{"name": "growth_limit", "factor": 1.5}],
    }
    manager = Config.model_validate(left_early).make_manager()
    sizes = []
    for ends in (False, False, True):
        signal = Signal.measured(
            plan_version=manager.version, ends_pass=ends, epochs_seen=0.3, num_steps=9, num_finite_steps=9
        )
        sizes.append(manager.decide(signal).plan.global_batch_size)
    assert sizes == [96, 128, 64]
