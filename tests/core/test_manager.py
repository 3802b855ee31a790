"""The manager: the sketch's API, one decision at a time, exact resume and replay."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from ray_dynbs import DynamicBatchSizeManager
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators import NoiseScale, PieceSums
from ray_dynbs.core.guards import Cooldown, WarmupHold
from ray_dynbs.core.journal import decode_lines, encode_line, replay, would_have
from ray_dynbs.core.lr import LR_RULES
from ray_dynbs.core.policies import Fixed, Threshold
from ray_dynbs.core.signal import Signal


def test_the_sketch_runs_unchanged() -> None:
    manager = DynamicBatchSizeManager(initial_batch_size=16)
    sizes = []
    for grad_norm, memory_usage in [(0.05, 0.3), (0.05, 0.3), (5.0, 0.3), (20.0, 0.3), (5.0, 0.99)]:
        sizes.append(manager.get_current_batch_size())
        manager.update_batch_size(grad_norm, memory_usage)
    assert sizes == [16, 32, 64, 64, 32]
    assert manager.batch_size_history == [32, 64, 64, 32, 32]


def test_the_sketch_with_its_meaning_of_memory() -> None:
    manager = DynamicBatchSizeManager(
        initial_batch_size=16,
        max_batch_size=64,
        min_batch_size=8,
        policy=Threshold(memory_vote="shrink", memory_grows=True),
    )
    sizes = [manager.update_batch_size(1.0, memory) for memory in (0.9, 0.9, 0.3, 0.3, 0.3, 0.3, 0.6)]
    assert sizes == [8, 8, 16, 32, 64, 64, 64]
    assert "clamp: 4 -> 8 (min 8)" in manager.decisions[1].reasons


def test_defaults_follow_an_initial_size_outside_them() -> None:
    assert DynamicBatchSizeManager(initial_batch_size=2).min_batch_size == 2
    assert DynamicBatchSizeManager(initial_batch_size=4096).max_batch_size == 4096


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"initial_batch_size": 4, "min_batch_size": 8}, "initial batch size is 4; allowed: 8 to 512"),
        ({"min_batch_size": 64, "max_batch_size": 32}, "min is 64 and max is 32"),
        ({"initial_batch_size": 0}, "at least 1"),
        ({"initial_batch_size": 32.0}, "whole number"),
        ({"max_lr_scale": 0.0}, "> 0"),
        ({"world_size": 0}, "at least 1"),
    ],
)
def test_wrong_sizes_are_refused(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DynamicBatchSizeManager(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("grad_norm", [float("nan"), float("inf")])
def test_a_bad_signal_holds_and_says_so(grad_norm: float) -> None:
    manager = DynamicBatchSizeManager(16)
    assert manager.update_batch_size(grad_norm, 0.1) == 16
    assert str(grad_norm) in manager.decisions[-1].reasons[0]


class _AlwaysGrow(Fixed):
    """A careless policy, which the manager must keep from growing on bad evidence."""

    def update(self, proposal, state, view):  # type: ignore[no-untyped-def]
        return proposal.because("grow", global_batch_size=view.plan.global_batch_size * 2), state


@pytest.mark.parametrize(
    "fields",
    [
        {"num_steps": 4, "num_finite_steps": 0},
        {"num_steps": 4, "num_finite_steps": 1},
        {"num_steps": 4, "num_finite_steps": 4, "train_loss": float("nan")},
        {"num_steps": 4, "num_finite_steps": 4, "plan_version": 7},
        {},
    ],
)
def test_no_policy_grows_the_batch_on_bad_evidence(fields: dict[str, float]) -> None:
    manager = DynamicBatchSizeManager(16, policy=_AlwaysGrow())
    assert manager.decide(Signal.measured(**fields)).plan.global_batch_size == 16
    good = Signal.measured(num_steps=4, num_finite_steps=4, plan_version=1, train_loss=1.0)
    assert manager.decide(good).plan.global_batch_size == 32


class _Proposes(Fixed):
    """A policy that proposes something that is no size."""

    value: object = None

    def update(self, proposal, state, view):  # type: ignore[no-untyped-def]
        return proposal.because("mine", global_batch_size=self.value), state


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 24.0, "24", None, True, 0, -3])
def test_a_proposal_that_is_no_whole_number_holds(value: object) -> None:
    manager = DynamicBatchSizeManager(16, policy=type("P", (_Proposes,), {"value": value})())
    decision = manager.decide(Signal.measured(num_steps=1, num_finite_steps=1, grad_norm=1.0))
    assert decision.plan.global_batch_size == 16
    assert "not whole numbers of at least 1, hold" in decision.reasons[0]


def test_numpy_numbers_are_numbers() -> None:
    manager = DynamicBatchSizeManager(16, policy=type("P", (_Proposes,), {"value": np.int64(24)})())
    decision = manager.decide(Signal.measured(num_steps=1, num_finite_steps=1, grad_norm=1.0))
    assert decision.plan.global_batch_size == 24
    assert encode_line(decision)
    manager = DynamicBatchSizeManager(16)
    manager.update_batch_size(np.float32(0.01), np.float64(0.3))  # type: ignore[arg-type]
    assert json.loads(encode_line(manager.decisions[-1]))["global_batch_size"] == 32


@pytest.mark.parametrize("grad_norm", [None, -1.0])
def test_a_norm_that_was_not_measured_never_grows_the_batch(grad_norm: float | None) -> None:
    policy = Threshold(memory_vote="shrink", memory_grows=True)
    assert DynamicBatchSizeManager(16, policy=policy).update_batch_size(grad_norm, 0.1) == 16


def test_the_batch_stops_at_the_rows_there_are_and_the_lr_with_it() -> None:
    manager = DynamicBatchSizeManager(16, lr_rule=LR_RULES["linear"]())
    lines = [encode_line(manager.start(world_size=2, num_rows=20))]
    for _ in range(4):
        signal = Signal.measured(
            plan_version=manager.version, num_steps=1, num_finite_steps=1, grad_norm=0.01
        )
        lines.append(encode_line(manager.decide(signal)))
    last = decode_lines("\n".join(lines))[-1]
    assert (last.plan.global_batch_size, last.lr_scale) == (20, 1.25)
    assert "32 -> 20 (all the rows there are)" in decode_lines(lines[1])[0].reasons
    assert (
        replay(
            decode_lines("\n".join(lines)), lambda: DynamicBatchSizeManager(16, lr_rule=LR_RULES["linear"]())
        )
        == []
    )
    fewer = DynamicBatchSizeManager(16).start(world_size=1, num_rows=5)
    assert fewer.plan.global_batch_size == 5
    assert "16 -> 5" in fewer.reasons[0]


def test_what_was_learned_about_memory_outlives_a_roll_back() -> None:
    manager = DynamicBatchSizeManager(32)
    before = manager.state_dict()
    manager.update_batch_size(1.0, 0.95)
    learned = manager.decisions[-1].micro_ceiling
    assert learned == 16
    manager = DynamicBatchSizeManager(32)
    manager.load_state_dict(before)
    decision = manager.start(world_size=1, incarnation=1, micro_ceiling=learned)
    assert decision.plan.micro_batch_size == 16


def test_the_reference_stays_the_one_the_run_began_with() -> None:
    manager = DynamicBatchSizeManager(16, lr_rule=LR_RULES["linear"]())
    manager.update_batch_size(0.01, 0.1)
    later = DynamicBatchSizeManager(64, lr_rule=LR_RULES["linear"]())
    later.load_state_dict(manager.state_dict())
    decision = later.start(world_size=1, incarnation=1)
    assert (decision.plan.global_batch_size, decision.lr_scale) == (32, 2.0)


def test_a_vetoed_move_does_not_restart_the_cooldown() -> None:
    manager = DynamicBatchSizeManager(16, guards=[Cooldown(decisions=2)])
    sizes = [manager.update_batch_size(0.01, 0.1) for _ in range(7)]
    assert sizes == [32, 32, 32, 64, 64, 64, 128]


def test_a_hundred_changes_leave_the_lr_scale_where_it_was() -> None:
    manager = DynamicBatchSizeManager(16, lr_rule=LR_RULES["linear"]())
    for _ in range(50):
        manager.update_batch_size(0.01, 0.1)
        manager.update_batch_size(100.0, 0.1)
    assert manager.get_current_batch_size() == 16
    assert manager.decisions[-1].lr_scale == 1.0


def test_a_capped_lr_scale_names_both_numbers() -> None:
    manager = DynamicBatchSizeManager(16, lr_rule=LR_RULES["linear"](), max_lr_scale=1.5)
    manager.update_batch_size(0.01, 0.1)
    assert manager.decisions[-1].lr_scale == 1.5
    assert "lr_scale 2 -> 1.5 (max_scale)" in manager.decisions[-1].reasons


def _make() -> DynamicBatchSizeManager:
    return DynamicBatchSizeManager(
        16, 256, 4, guards=[WarmupHold(epochs=1), Cooldown(decisions=1)], lr_rule=LR_RULES["sqrt"]()
    )


def _signal(rng: random.Random, manager: DynamicBatchSizeManager, epoch: int) -> Signal:
    return Signal.measured(
        epoch=epoch,
        epochs_seen=epoch + 1.0,
        step=10 * (epoch + 1),
        plan_version=manager.version,
        num_steps=10,
        num_finite_steps=10,
        grad_norm=rng.choice([0.01, 0.1 + rng.random(), 30.0, float("nan")]),
        memory_fraction=rng.random(),
    )


def test_a_journal_with_restarts_and_roll_backs_replays_bit_for_bit() -> None:
    rng, lines = random.Random(0), []
    manager = _make()
    lines.append(encode_line(manager.start(world_size=2)))
    saved = {}
    for epoch in range(6):
        lines.append(encode_line(manager.decide(_signal(rng, manager, epoch))))
        saved[epoch] = json.loads(json.dumps(manager.state_dict()))
    for incarnation, back_to, world_size in [(1, 2, 3), (2, 4, 1)]:
        manager = _make()
        manager.load_state_dict(saved[back_to])
        lines.append(encode_line(manager.start(world_size=world_size, incarnation=incarnation)))
        for epoch in range(back_to + 1, 6):
            lines.append(encode_line(manager.decide(_signal(rng, manager, epoch))))
            saved[epoch] = manager.state_dict()
    decisions = decode_lines("\n".join(lines))
    assert len({d.plan.global_batch_size for d in decisions}) >= 3
    assert replay(decisions, _make) == []
    other = replay(decisions, lambda: DynamicBatchSizeManager(16, 256, 4, policy=Fixed()))
    assert other, "a journal must not reproduce under another policy"


def test_a_state_saved_under_another_policy_is_taken_over_and_said() -> None:
    saved = _make().state_dict()
    manager = DynamicBatchSizeManager(16, 256, 4, policy=Fixed())
    manager.load_state_dict(saved)
    said = manager.start(world_size=1, incarnation=1).reasons[0]
    assert "what the earlier policy and guards remembered is dropped" in said


def test_narrower_bounds_after_a_resume_are_kept_and_said() -> None:
    manager = DynamicBatchSizeManager(64, 256, 4)
    later = DynamicBatchSizeManager(16, 32, 4)
    later.load_state_dict(manager.state_dict())
    decision = later.start(world_size=1, incarnation=1)
    assert decision.plan.global_batch_size == 32
    assert "64 -> 32" in decision.reasons[0]


@pytest.mark.parametrize("state", [{}, {"global_batch_size": 4}, {**_make().state_dict(), "changed_at": 3}])
def test_a_foreign_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="not a manager state"):
        _make().load_state_dict(state)


@pytest.mark.parametrize("text", ["{", '{"version": 1}', "[]", "3"])
def test_a_broken_journal_names_the_line(text: str) -> None:
    with pytest.raises(ConfigError, match="journal line 1"):
        decode_lines(text)


def test_core_imports_without_torch_ray_or_pyarrow_and_quickly() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'ray', 'pyarrow', 'pydantic'): sys.modules[name] = None\n"
        "import pkgutil, ray_dynbs.core as core\n"
        "for m in pkgutil.walk_packages(core.__path__, 'ray_dynbs.core.'): __import__(m.name)\n"
        "print(len([m for m in sys.modules if m.startswith('ray_dynbs.core')]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(result.stdout) > 15


def measured(manager: DynamicBatchSizeManager, **fields: Any) -> Signal:
    known = {"num_steps": 10, "num_finite_steps": 10, "grad_norm": 0.01, "plan_version": manager.version}
    return Signal.measured(**{**known, **fields})


def test_a_few_rows_decide_nothing() -> None:
    """One step of a pass's last row after a decision: less than a batch was seen."""
    manager = DynamicBatchSizeManager(16)
    manager.start(world_size=1, num_rows=641)
    held = manager.decide(measured(manager, rows=1, num_steps=1, num_finite_steps=1))
    assert held.plan.global_batch_size == 16
    assert held.reasons == ("1 rows since the last decision, 16 in a batch: hold",)
    assert manager.decide(measured(manager, rows=160)).plan.global_batch_size == 32
    whole = DynamicBatchSizeManager(16)
    whole.start(world_size=1, num_rows=12)
    assert whole.decide(measured(whole, rows=12, grad_norm=20.0)).plan.global_batch_size == 8


def test_a_configured_limit_of_the_micro_batch_may_change_and_a_learned_one_stays() -> None:
    saved = DynamicBatchSizeManager(32, max_micro_batch_size=4).state_dict()
    later = DynamicBatchSizeManager(32, max_micro_batch_size=16)
    later.load_state_dict(saved)
    assert later.start(world_size=1).plan.micro_batch_size == 16
    later.update_batch_size(1.0, 0.95)
    free = DynamicBatchSizeManager(32)
    free.load_state_dict(later.state_dict())
    assert free.start(world_size=1).plan.micro_batch_size == 8
    free.limit_micro_batch(3)
    free.limit_micro_batch(None)
    free.limit_micro_batch(5)
    assert free.plan.micro_batch_size == 3


def test_a_state_outside_the_bounds_is_brought_within_them_at_once() -> None:
    saved = DynamicBatchSizeManager(4096).state_dict()
    manager = DynamicBatchSizeManager(16, 64)
    manager.load_state_dict(saved)
    assert manager.get_current_batch_size() == 64
    assert "4096 -> 64" in manager.start(world_size=1, incarnation=1).reasons[0]


def test_noise_averaged_in_another_way_is_dropped_and_said() -> None:
    manager = DynamicBatchSizeManager(16)
    manager.decide(measured(manager, pieces=PieceSums.of_step(1.0, 9.0)))
    other = DynamicBatchSizeManager(16, noise=NoiseScale(decay=0.9))
    other.load_state_dict(manager.state_dict())
    assert "known of the noise is dropped" in other.start(world_size=1, incarnation=1).reasons[0]
    assert other.estimates.noise_scale is None


def test_in_a_plain_loop_passes_are_counted_where_their_rows_are_known() -> None:
    manager = DynamicBatchSizeManager(16, guards=[WarmupHold(epochs=1)], num_rows=64)
    assert [manager.update_batch_size(0.01) for _ in range(5)] == [16, 16, 16, 32, 64]
    assert [decision.epoch for decision in manager.decisions] == [0, 0, 0, 1, 1]


def test_memory_above_all_there_is_is_no_measurement() -> None:
    signal = Signal.measured(memory_fraction=85.0)
    assert signal.memory_fraction is None
    assert signal.missing == (("memory_fraction", "85.0"),)


BROKEN = [
    ("signal", "x"),
    ("signal", []),
    ("version", [0]),
    ("num_rows", "x"),
    ("global_batch_size", 32.5),
    ("lr_scale", "1"),
    ("signal.grad_norm", "x"),
    ("signal.missing", []),
    ("signal.num_steps", None),
    ("signal.pieces", {"steps": None}),
    ("signal.nonsense", 1),
]


@pytest.mark.parametrize(("key", "value"), BROKEN)
def test_an_edited_journal_is_told_by_its_line(key: str, value: Any) -> None:
    manager = DynamicBatchSizeManager(16)
    record = json.loads(encode_line(manager.decide(measured(manager, pieces=PieceSums.of_step(1.0, 2.0)))))
    assert decode_lines(json.dumps(record))
    place = record["signal"] if "." in key else record
    place[key.rpartition(".")[2]] = value
    with pytest.raises(ConfigError, match="journal line 1 is not a decision"):
        decode_lines(json.dumps(record))


def test_a_replay_follows_the_configurations_that_a_run_had() -> None:
    lines, manager = [], DynamicBatchSizeManager(16)
    lines.append(encode_line(manager.start(world_size=1)))
    lines.append(encode_line(manager.decide(measured(manager))))
    later = DynamicBatchSizeManager(16, policy=Fixed())
    later.load_state_dict(manager.state_dict())
    lines.append(encode_line(later.start(world_size=1, incarnation=1)))
    lines.append(encode_line(later.decide(measured(later))))
    decisions = decode_lines("\n".join(lines))

    def newest() -> DynamicBatchSizeManager:
        return DynamicBatchSizeManager(16, policy=Fixed())

    assert len(replay(decisions, newest)) > 0
    assert replay(decisions, newest, {1: lambda: DynamicBatchSizeManager(16)}) == []


def test_another_policy_meets_the_memory_and_the_stale_signals_that_were_met() -> None:
    manager = DynamicBatchSizeManager(64)
    decisions = [manager.start(world_size=1)]
    decisions.append(manager.decide(measured(manager, grad_norm=1.0, memory_fraction=0.95)))
    decisions.append(manager.decide(measured(manager, plan_version=0)))
    decisions.append(manager.decide(measured(manager)))
    pairs = would_have(decisions, lambda: DynamicBatchSizeManager(64, policy=Fixed()))
    assert [other.plan.micro_batch_size for _, other in pairs[1:]] == [32, 32]
    grown = would_have(decisions, lambda: DynamicBatchSizeManager(64))
    assert [other.plan.global_batch_size for _, other in grown] == [64, 64, 128]
    assert "stale" in grown[1][1].reasons[0]
