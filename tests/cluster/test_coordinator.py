"""The actor gives the manager's own decisions, also after its death."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from ray_dynbs.cluster.coordinator import Coordinator, DecisionRequest, EpochRecord, start_coordinator
from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.journal import decode_lines, replay
from ray_dynbs.core.signal import Signal
from ray_dynbs.storage.run_directory import DECISIONS, RunDirectory
from ray_dynbs.storage.tables import EPOCH_SCHEMA

CONFIG = Config.model_validate(
    {
        "task": "tests.problem_task",
        "epochs": 3,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch": {"initial": 16},
        "guards": [],
    }
)


def signal(version: int, grad_norm: float = 0.01) -> Signal:
    return Signal.measured(
        epoch=version, plan_version=version, num_steps=3, num_finite_steps=3, grad_norm=grad_norm
    )


def record(epoch: int, incarnation: int = 0) -> EpochRecord:
    return EpochRecord(dict.fromkeys(EPOCH_SCHEMA.names) | {"epoch": epoch, "incarnation": incarnation})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(str(tmp_path), "run")


def test_a_repeated_call_gives_the_same_decision_once(run: RunDirectory) -> None:
    coordinator = Coordinator(CONFIG, run)
    started = coordinator.start("group", 2, 100, None)
    assert coordinator.start("group", 2, 100, None) == started
    request = DecisionRequest(started.state, signal(0), (record(0),))
    reply = coordinator.decide(request)
    assert coordinator.decide(request) == reply
    assert reply.decision.plan.global_batch_size == 32
    assert len(decode_lines(run.read_text(DECISIONS))) == 2
    assert [row["epoch"] for row in run.read_epochs()] == [0]


def test_another_process_takes_the_journal_over(run: RunDirectory) -> None:
    first = Coordinator(CONFIG, run)
    state = first.start("a", 2, 1000, None).state
    for version in range(3):
        state = first.decide(DecisionRequest(state, signal(version), (record(version),))).state
    second = Coordinator(CONFIG, run)
    restarted = second.start("b", 3, 1000, state)
    assert (restarted.decision.incarnation, restarted.decision.version) == (1, 3)
    assert restarted.decision.plan.global_batch_size == 128
    assert len(second.progress(0)) == 3
    assert second.progress(3) == []
    assert replay(decode_lines(run.read_text(DECISIONS)), CONFIG.make_manager) == []


def test_a_halved_micro_batch_outlives_the_checkpoint_it_did_not_reach(run: RunDirectory) -> None:
    coordinator = Coordinator(CONFIG, run)
    started = coordinator.start("a", 2, 1000, None)
    full = Signal.measured(num_steps=1, num_finite_steps=1, grad_norm=1.0, memory_fraction=0.95)
    assert coordinator.decide(DecisionRequest(started.state, full)).decision.plan.micro_batch_size == 4
    again = Coordinator(CONFIG, run).start("b", 2, 1000, started.state)
    assert again.decision.plan.micro_batch_size == 4
    assert replay(decode_lines(run.read_text(DECISIONS)), CONFIG.make_manager) == []


def test_a_policy_state_that_no_checkpoint_can_hold_is_refused_at_once(run: RunDirectory) -> None:
    config = CONFIG.model_copy(update={"policy": {"name": "tests.problem_task.forgetful"}})
    coordinator = Coordinator(config, run)
    with pytest.raises(ConfigError, match="is not JSON"):
        coordinator.start("a", 1, 1000, None)


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_the_actor_equals_the_object_and_survives_its_death(
    cluster: None, run: RunDirectory, tmp_path: Path
) -> None:
    plain = Coordinator(CONFIG, RunDirectory.create(str(tmp_path), "plain"))
    actor = start_coordinator(CONFIG, run)
    expected, got = plain.start("g", 2, 1000, None), ray.get(actor.start.remote("g", 2, 1000, None))
    assert got == expected
    for version in range(6):
        request = DecisionRequest(got.state, signal(version, 0.01 if version % 2 else 20.0))
        if version == 3:
            ray.kill(actor, no_restart=False)
        expected, got = plain.decide(request), ray.get(actor.decide.remote(request), timeout=120)
        assert got == expected
    versions = [d.version for d in decode_lines(run.read_text(DECISIONS))]
    assert versions == list(range(7))
    ray.kill(actor)
