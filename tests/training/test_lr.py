"""The LR is scaled around the step, restored exactly, and never seen by a scheduler."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ray_dynbs.core.decision import Decision
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.lr import LR_RULES, Adjustment, GainProgress, Scaling, ScheduleProgress
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.core.signal import Signal
from ray_dynbs.training.loop import TrainingLoop
from ray_dynbs.training.lr import Schedule, adjusted, base_lr, scheduler_class
from ray_dynbs.training.optimizers import build_optimizer, build_scheduler
from tests.support import squared_error, table, training_loop

SCHEDULERS: dict[str, dict[str, Any]] = {
    "CosineAnnealingLR": {"T_max": "auto"},
    "StepLR": {"step_size": 7},
    "MultiStepLR": {"milestones": [5, 20]},
    "ExponentialLR": {"gamma": 0.99},
    "LinearLR": {"total_iters": "auto"},
    "OneCycleLR": {"max_lr": 0.2, "total_steps": "auto"},
    "PolynomialLR": {"total_iters": "auto", "power": 2},
    "CosineAnnealingWarmRestarts": {"T_0": 10},
    "ConstantLR": {"total_iters": 5},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1},
}

MEASURED = Signal.measured(num_steps=1)


def decision(size: int, scale: float, version: int = 1, signal: Signal | None = MEASURED) -> Decision:
    return Decision(
        incarnation=0,
        version=version,
        epoch=0,
        step=0,
        samples_seen=0,
        plan=BatchPlan.fit(size, 1),
        lr_scale=scale,
        micro_ceiling=None,
        num_rows=None,
        reasons=(),
        signal=signal,
    )


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_base_lr_comes_back_bit_for_bit(as_tensor: bool) -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    lrs = [torch.tensor(0.1), torch.tensor(0.003)] if as_tensor else [0.1, 0.003]
    optimizer = torch.optim.SGD([{"params": [w], "lr": lr} for w, lr in zip(weights, lrs, strict=True)])
    held = [group["lr"] for group in optimizer.param_groups]
    before = [float(lr) for lr in held]
    for scale in [random.Random(0).uniform(0.01, 100) for _ in range(100)]:
        with adjusted(optimizer, Adjustment(scale)):
            inside = [float(group["lr"]) for group in optimizer.param_groups]
            assert inside == pytest.approx([lr * scale for lr in before])
    assert [float(group["lr"]) for group in optimizer.param_groups] == before
    assert not as_tensor or all(g["lr"] is h for g, h in zip(optimizer.param_groups, held, strict=True))


def test_the_lr_comes_back_after_an_error() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def fail() -> None:
        with adjusted(optimizer, Adjustment(4.0)):
            raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        fail()
    assert base_lr(optimizer) == 0.1


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("rule", sorted(LR_RULES))
def test_betas_eps_and_decay_return_exactly(rule: str, as_tensor: bool) -> None:
    """A hundred changes with every rule, groups of their own, numbers or tensors."""
    lr: Any = torch.tensor(1e-3) if as_tensor else 1e-3
    betas: Any = (torch.tensor(0.9), torch.tensor(0.999)) if as_tensor else (0.9, 0.999)
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 5e-4, "weight_decay": 0.3}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, foreach=False, capturable=False)
    before = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    held = [optimizer.param_groups[0]["lr"], *optimizer.param_groups[0]["betas"]]
    rng = random.Random(rule)
    for _ in range(100):
        ratio = rng.uniform(0.1, 5)
        scaling = Scaling(LR_RULES[rule](), 1000, scale_weight_decay=True)
        adjustment = scaling.at(int(ratio * 1000), rng.uniform(0.1, 9), 3.0)
        with adjusted(optimizer, adjustment):
            first, second = optimizer.param_groups
            assert float(first["lr"]) == pytest.approx(1e-3 * adjustment.lr)
            assert float(second["lr"]) / float(first["lr"]) == pytest.approx(0.5)
            decay = 0.3 * adjustment.ratio / adjustment.lr
            assert second["weight_decay"] == pytest.approx(decay)
            expected = adjustment.rule.betas(adjustment.ratio, (0.9, 0.999))
            assert [float(beta) for beta in first["betas"]] == pytest.approx(expected, rel=1e-5)
            assert first["eps"] == pytest.approx(adjustment.rule.eps(adjustment.ratio, 1e-8))
    after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert after == before
    if as_tensor:
        assert all(a is b for a, b in zip(held, [after[0]["lr"], *after[0]["betas"]], strict=True))


def test_a_schedule_by_gain_advances_by_adascales_gain() -> None:
    """At the reference batch as in a plain loop; beyond it by r per step; the root's square for Adam."""
    gains, counts = {}, {}
    for rule, batch, scale in [
        ("adascale", 4, 1.0),
        ("adascale", 8, 1.5),
        ("adascale_sqrt", 8, 1.5**0.5),
        ("adascale", 2, 0.75),
    ]:
        model, loop = training_loop(
            table(30),
            BatchPlan.fit(batch, 1),
            make_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.9),
            reference=4,
        )
        loop._scaling = Scaling(LR_RULES[rule](), 4)
        loop._schedules[0].plan_by(GainProgress(30, 4))
        loop.apply(decision(batch, scale))
        report = loop.train_epoch(squared_error(model))
        gains[rule, batch], counts[rule, batch] = loop.progress.gain, loop._schedules[0]._count
        assert report.steps == -(-30 // batch)
    assert gains == pytest.approx(
        {("adascale", 4): 8, ("adascale", 8): 6, ("adascale_sqrt", 8): 6, ("adascale", 2): 11.25}
    )
    assert list(counts.values()) == [8, 6, 6, 11]


def test_a_schedule_by_gain_resumes_exactly_and_leaves_out_skipped_steps() -> None:

    def build() -> Schedule:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        optimizer.step()
        return Schedule(scheduler, GainProgress(30, 4))

    schedule = build()
    schedule.after_step(0, 8, applied=True, gain=1.5)
    schedule.after_step(0, 16, applied=False, gain=1.5)
    schedule.leave(0, 16, 1.5)
    schedule.after_step(1, 8, applied=True, gain=3.0)
    assert schedule._count == 3
    other = build()
    other.load_state_dict(schedule.state_dict(), 1, 8, 3.0)
    other.after_step(1, 16, applied=True, gain=4.5)
    assert other._count == 4


def test_the_step_uses_the_scaled_lr() -> None:
    """One SGD step at scale k moves the weights k times as far."""
    moved = []
    for scale in (1.0, 3.0):
        model, loop = training_loop(
            table(8), BatchPlan.fit(8, 1), make_optimizer=lambda p: torch.optim.SGD(p, lr=0.01)
        )
        before = model[0].weight.detach().clone()
        loop.apply(decision(8, scale))
        report = loop.train_epoch(squared_error(model))
        assert report.lr == pytest.approx(0.01 * scale)
        moved.append(model[0].weight.detach() - before)
    torch.testing.assert_close(moved[1], 3 * moved[0])


def test_a_change_is_ramped_and_goes_on_after_a_restart() -> None:
    def build() -> tuple[Any, TrainingLoop]:
        model, loop = training_loop(
            table(40), BatchPlan.fit(8, 1), make_optimizer=lambda p: torch.optim.SGD(p, lr=1.0)
        )
        loop._scaling = Scaling(LR_RULES["none"](), 8, ramp_steps=8)
        return model, loop

    def scales(model: Any, loop: TrainingLoop) -> list[float]:
        found = []
        for batch in loop.batches():
            loop.step(batch, lambda rows: (0 * squared_error(model)(rows)[0], len(rows["y"])))
            found.append(loop._last_scale)
        loop.finish_epoch()
        return found

    model, loop = build()
    loop.apply(decision(8, 2.0, signal=None))
    assert scales(model, loop) == [2.0] * 5
    loop.apply(decision(8, 4.0, 1))
    assert scales(model, loop) == [2.25, 2.5, 2.75, 3.0, 3.25]
    again_model, again = build()
    again.load_state_dict(loop.state_dict())
    again.apply(decision(8, 4.0, 1, signal=None))
    assert scales(again_model, again) == scales(model, loop) == [3.5, 3.75, 4.0, 4.0, 4.0]
    again.apply(decision(8, 1.0, 2))
    assert scales(again_model, again)[0] == 4.0 - 3.0 / 8


def run_with_sizes(name: str, sizes: list[int], reference: int) -> tuple[float, TrainingLoop]:
    """Base LR after three epochs of 50 rows, with the size changed at every step of the way."""
    progress = ScheduleProgress(50, reference)
    planned = 3 * progress.steps_per_epoch
    model, loop = training_loop(
        table(50),
        BatchPlan.fit(reference, 1),
        make_scheduler=lambda o: build_scheduler(name, o, SCHEDULERS[name], planned),
        reference=reference,
    )
    remaining = list(sizes)
    before = loop._schedules[0].after_step

    def change(epoch: int, rows: int, *, applied: bool, gain: float = 0.0) -> None:
        before(epoch, rows, applied=applied, gain=gain)
        if remaining:
            size = remaining.pop(0)
            loop.apply(decision(size, size / reference))

    loop._schedules[0].after_step = change  # type: ignore[method-assign]
    for _ in range(3):
        loop.train_epoch(squared_error(model))
    return base_lr(loop._step.optimizers[0]), loop


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_a_schedule_ends_at_its_planned_value_after_any_history_of_sizes(name: str) -> None:
    planned, _ = run_with_sizes(name, [], 8)
    rng = random.Random(name)
    for _ in range(3):
        sizes = [rng.randint(1, 50) for _ in range(100)]
        assert run_with_sizes(name, sizes, 8)[0] == pytest.approx(planned, rel=1e-12, abs=1e-15)


def test_a_hundred_changes_leave_the_lr_where_it_began() -> None:
    rng = random.Random(1)
    model, loop = training_loop(
        table(400), BatchPlan.fit(4, 1), make_optimizer=lambda p: torch.optim.SGD(p, lr=1e-4)
    )
    start = base_lr(loop._step.optimizers[0])
    for number in range(100):
        loop.apply(decision(rng.randint(1, 40), rng.uniform(0.01, 50), number))
        if number % 20 == 0:
            loop.train_epoch(squared_error(model))
    loop.apply(decision(4, 1.0, 101))
    report = loop.train_epoch(squared_error(model))
    assert base_lr(loop._step.optimizers[0]) == start == report.lr


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_a_schedule_resumes_exactly(name: str) -> None:
    def build() -> tuple[torch.optim.Optimizer, Schedule]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        scheduler = build_scheduler(name, optimizer, SCHEDULERS[name], 30)
        return optimizer, Schedule(scheduler, ScheduleProgress(100, 10))

    def advance(optimizer: torch.optim.Optimizer, schedule: Schedule, epochs: range) -> list[float]:
        lrs = []
        for epoch in epochs:
            for rows in range(5, 101, 5):
                optimizer.step()
                schedule.after_step(epoch, rows, applied=True)
                lrs.append(base_lr(optimizer))
        return lrs

    straight = advance(*build(), range(3))
    optimizer, schedule = build()
    advance(optimizer, schedule, range(1))
    saved = optimizer.state_dict(), schedule.state_dict()
    optimizer, schedule = build()
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1], 1)
    assert advance(optimizer, schedule, range(1, 3)) == straight[20:]


def drive(schedule: Schedule, optimizer: torch.optim.Optimizer, epochs: range, rows: int, size: int) -> None:
    for epoch in epochs:
        for first in range(0, rows, size):
            optimizer.step()
            schedule.after_step(epoch, min(first + size, rows), applied=True)


@pytest.mark.parametrize(
    ("rows", "reference", "epochs"), [(100, 10, 12), (1000, 10, 12), (50, 10, 6), (100, 20, 6)]
)
def test_a_resumed_schedule_goes_on_from_where_it_was(rows: int, reference: int, epochs: int) -> None:
    """More epochs, other rows or another reference: the LR neither jumps, nor climbs again, nor raises."""

    def build(progress: ScheduleProgress, planned: int) -> tuple[torch.optim.Optimizer, Schedule]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler = build_scheduler("OneCycleLR", optimizer, {"max_lr": 0.1, "total_steps": "auto"}, planned)
        return optimizer, Schedule(scheduler, progress, planned_steps=planned)

    first = ScheduleProgress(100, 10)
    optimizer, schedule = build(first, 60)
    drive(schedule, optimizer, range(3), 100, 7)
    saved, reached = (optimizer.state_dict(), schedule.state_dict()), base_lr(optimizer)
    later = ScheduleProgress(rows, reference)
    optimizer, schedule = build(later, epochs * later.steps_per_epoch)
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1], 3)
    assert base_lr(optimizer) == reached
    schedule.after_step(3, 1, applied=True)
    assert abs(base_lr(optimizer) - reached) < 0.005
    lrs = []
    for epoch in range(3, epochs):
        drive(schedule, optimizer, range(epoch, epoch + 1), rows, 7)
        lrs.append(base_lr(optimizer))
    assert lrs == sorted(lrs, reverse=True)
    assert schedule.planned_steps == 60


def test_skipped_steps_are_not_made_up_for() -> None:
    """10 rows at a reference of 8, the short last step skipped: as a plain loop with GradScaler counts."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = Schedule(lr_scheduler.ExponentialLR(optimizer, 0.5), ScheduleProgress(10, 8))
    for epoch in range(4):
        optimizer.step()
        schedule.after_step(epoch, 8, applied=True)
        schedule.after_step(epoch, 10, applied=False)
    assert base_lr(optimizer) == 0.5**4


def test_per_epoch_schedulers_step_once_an_epoch() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    progress = ScheduleProgress(100, 10)
    plateau = Schedule(lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), progress)
    for loss in (1.0, 2.0, 3.0, None):
        optimizer.step()
        plateau.after_step(0, 50, applied=True)
        plateau.after_epoch(loss)
    assert base_lr(optimizer) == 0.25
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.25)
    stepped = Schedule(lr_scheduler.StepLR(optimizer, 1, 0.1), progress, per_epoch=True)
    optimizer.step()
    stepped.after_step(0, 100, applied=True)
    assert base_lr(optimizer) == 0.25
    stepped.after_epoch(None)
    assert base_lr(optimizer) == pytest.approx(0.025)


def test_names_and_arguments_are_checked() -> None:
    weight = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = build_optimizer("sgd", weight, {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"'Cosine'; allowed: none, "):
        scheduler_class("Cosine")
    with pytest.raises(ConfigError, match="unknown argument 'tmax'; allowed: T_max"):
        build_scheduler("CosineAnnealingLR", optimizer, {"tmax": 3}, 10)
    with pytest.raises(ConfigError, match=r"T_max.*auto stands for the 10 steps"):
        build_scheduler("CosineAnnealingLR", optimizer, {}, 10)
    with pytest.raises(ConfigError, match="unknown argument 'betas'"):
        build_optimizer("sgd", weight, {"lr": 0.1, "betas": [0.9, 0.99]})
    with pytest.raises(ConfigError, match="momentum"):
        build_optimizer("sgd", weight, {"lr": 0.1, "momentum": -1.0})
    assert build_scheduler("none", optimizer, {}, 10) is None


def test_an_optimizer_without_eps_is_scaled_like_any_other() -> None:
    """Lion and its like have betas and no eps."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    with adjusted(optimizer, Scaling(LR_RULES["half_life"](), 8).at(16, 2.0, 1.0)):
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.99**2)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_betas_that_a_scheduler_moved_out_of_the_rules_reach_are_refused_and_nothing_is_left_changed() -> (
    None
):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.Adam(groups, lr=0.1, betas=(0.9, 0.999))
    optimizer.param_groups[1]["betas"] = (0.8, 0.999)
    with (
        pytest.raises(ConfigError, match=r"at 8 times the reference batch the LR rule makes betas \[-0\.6, "),
        adjusted(optimizer, Scaling(LR_RULES["adam_sde"](), 8).at(64, 2.0, 1.0)),
    ):
        raise AssertionError
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999), (0.8, 0.999)]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt", "legw"])
def test_weight_decay_keeps_rows_over_lr_times_decay(rule: str) -> None:
    for size in (4, 16, 256):
        scaling = Scaling(LR_RULES[rule](), 16, scale_weight_decay=True)
        scale = LR_RULES[rule]().scale(size / 16)
        adjustment = scaling.at(size, scale, 9.0)
        assert size / (adjustment.lr * adjustment.weight_decay) == pytest.approx(16)
