"""Probing with a simulated memory, per rank: real steps, an exact answer, no trace."""

from __future__ import annotations

import contextlib
import copy
import random
import resource
import signal
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.core.probed import ProbeResult
from ray_dynbs.training import columns, sizes
from ray_dynbs.training.columns import ColumnStore
from ray_dynbs.training.datasets import DatasetStore
from ray_dynbs.training.feed import IndexedFeed
from ray_dynbs.training.gauge import MemoryGauge, Peak
from ray_dynbs.training.measuring import takes_memory
from ray_dynbs.training.memory import PeakMeter
from ray_dynbs.training.noise import Measure
from ray_dynbs.training.oom import is_out_of_memory
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.probe import Probe, unless_it_fails
from ray_dynbs.training.step import OptimizerStep
from ray_dynbs.training.world import World
from tests.control_groups import control_group, run_script
from tests.support import flat_weights, run_ranks, small_model, squared_error, table, training_loop

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
CAPACITY, HEADROOM = 16e9, 0.1


class SimulatedMemory:
    """A memory that holds what a rule says: too much raises, as an allocator does.

    Args:
        model: The model that is trained.
        peak: Rows of a micro-batch -> bytes.
    """

    def __init__(self, model: nn.Module, peak: Callable[[int], float]) -> None:
        self._loss, self._peak = squared_error(model), peak
        self._rest = self._highest = 0.0
        with contextlib.suppress(ValueError):
            self._rest = peak(0)
        self.sizes: list[int] = []

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        rows = len(batch["y"])
        self.sizes.append(rows)
        if self._peak(rows) > CAPACITY:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self._highest = max(self._highest, self._peak(rows))
        return self._loss(batch)

    doubts, ends_at = (), None

    def reset(self) -> None:
        self._highest = self._rest

    def peak(self) -> Peak:
        return Peak(self._highest, (1 - HEADROOM) * CAPACITY)


def line(maximum: int, base: float = 4e9) -> Callable[[int], float]:
    slope = ((1 - HEADROOM) * CAPACITY - base) / (maximum + 0.5)
    return lambda rows: base + slope * rows


def find(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    peak: Callable[[int], float],
    *,
    start: int = 16,
    most: int = 20_000,
    world: World | None = None,
) -> tuple[ProbeResult, SimulatedMemory]:
    """Probe a small model with a simulated memory."""
    world = world or World(0, 1, CPU)
    precision = MixedPrecision("fp64", CPU)
    step = OptimizerStep(model, optimizer, world, precision)
    memory = SimulatedMemory(model, peak)
    store = ColumnStore([table(50)])
    feed = IndexedFeed(store, rank=0, plan=BatchPlan.fit(4, 1), seed=0, shuffle="full", device=CPU)
    whole = Probe(model, step, precision, world, memory)
    return whole.find(memory.loss, feed.largest, start=start, most=most), memory


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("maximum", [1, 2, 7, 33, 500, 9_999])
@pytest.mark.parametrize("start", [1, 64, 4_096])
def test_the_largest_size_is_found_in_few_tries(maximum: int, start: int) -> None:
    model = small_model()
    result, memory = find(model, adam(model), line(maximum), start=start)
    assert 0.97 * maximum <= result.largest <= maximum
    assert len(result.tried) <= 5
    assert result.largest in memory.sizes  # it was run
    assert max(memory.sizes) <= 20_000
    assert 1 <= result.knee <= result.largest


def test_it_never_goes_beyond_the_most_allowed_and_tries_that_itself() -> None:
    model = small_model()
    result, memory = find(model, adam(model), line(10_000), most=100)
    assert result.largest == result.most == 100
    assert max(memory.sizes) == 100


class Clock:
    """Time that passes only as a loss says: so many seconds a row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(sizes.time, "perf_counter", lambda: self.now)


def timed(
    clock: Clock,
    seconds_per_row: Callable[[int], float],
    *,
    maximum: int = 300,
    most: int = 256,
    **options: Any,
) -> tuple[ProbeResult, list[int]]:
    """A probe with a simulated memory and a simulated speed."""
    model = small_model()
    precision = MixedPrecision("fp64", CPU)
    step = OptimizerStep(model, adam(model), World(0, 1, CPU), precision)
    memory = SimulatedMemory(model, line(maximum))
    feed = IndexedFeed(
        ColumnStore([table(50)]), rank=0, plan=BatchPlan.fit(4, 1), seed=0, shuffle="full", device=CPU
    )

    def loss(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        rows = len(batch["y"])
        clock.now += rows * seconds_per_row(rows)
        return memory.loss(batch)

    whole = Probe(model, step, precision, World(0, 1, CPU), memory)
    return whole.find(loss, feed.largest, start=16, most=256, **options), memory.sizes


def test_the_largest_size_is_taken_unless_a_smaller_one_is_surely_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    usual, _ = timed(clock, lambda rows: 1e-4 + 1e-2 / rows, sweep=True)  # faster, the more at once
    assert (usual.largest, usual.fastest, usual.ceiling, usual.limit) == (256, 256, None, None)
    assert usual.notes() == []
    assert usual.knee == 256

    even, _ = timed(clock, lambda rows: 1e-4, sweep=True)
    assert (even.fastest, even.knee) == (256, 1)

    slow, _ = timed(clock, lambda rows: 1e-4 * (1 if rows <= 64 else 1.5), sweep=True)
    assert (slow.largest, slow.fastest, slow.ceiling) == (256, 64, 64)
    assert slow.limit is None
    (note,) = slow.notes()
    assert note == ("speed: micro-batches of 64 rows, 10,000 rows/s and worker, are faster than 256, 6,667")
    hardly, _ = timed(clock, lambda rows: 1e-4 * (1 if rows <= 64 else 1.08), sweep=True)
    assert hardly.fastest == 256

    limited, _ = timed(clock, lambda rows: 1e-4, maximum=41, sweep=True)
    assert (limited.limit, limited.ceiling) == ("memory", limited.largest)
    assert 40 <= limited.largest <= 41


def test_a_size_that_was_faster_by_chance_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is timed again, in turn with the largest; one slower round is enough to leave it."""
    clock, calls = Clock(monkeypatch), [0]

    def chance(rows: int) -> float:
        calls[0] += rows == 64
        return 1e-4 * (0.5 if rows == 64 and calls[0] <= 20 else 1)  # the sweep and four rounds

    result, sizes = timed(clock, chance, sweep=True)
    assert result.fastest == 256
    assert sizes.count(64) > 20


def test_without_a_sweep_nobody_asks_for_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    result, _ = timed(clock, lambda rows: 1e-4 * (1 if rows <= 64 else 3))
    assert result.fastest == result.largest == 256


def test_a_size_that_would_take_too_long_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes 30 ms: 256 rows, four times, would be 31 s."""
    clock = Clock(monkeypatch)
    result, sizes = timed(clock, lambda rows: 0.03)
    assert result.limit == "time"
    assert result.largest == result.ceiling == max(sizes) == 64  # of 83 in 10 s
    assert "more, of 256 allowed, would have taken too long to try" in result.notes()[0]
    slowest, sizes = timed(clock, lambda rows: 10.0)
    assert set(sizes) == {16}  # the share that the run begins with is tried in any case
    assert slowest.ceiling == 16
    both, _ = timed(clock, lambda rows: 0.03, maximum=50)
    assert both.limit == "memory"
    assert 49 <= both.largest <= 50


def test_the_line_behind_the_peaks() -> None:
    model = small_model()
    result, _ = find(model, adam(model), lambda rows: 3e9 + 2e6 * rows, most=100)
    assert result.line == pytest.approx((3e9, 2e6))


def test_one_row_that_does_not_fit_says_what_it_takes() -> None:
    model = small_model()
    with pytest.raises(ConfigError, match=r"one row takes 14.3 GiB, others' included, where 13.4 GiB may be"):
        find(model, adam(model), lambda rows: 15.4e9 + 1e6 * rows)
    with pytest.raises(ConfigError, match="micro-batch of one row runs out of memory"):
        find(model, adam(model), lambda rows: 2 * CAPACITY)


class Everything(nn.Module):
    """BatchNorm, dropout, a frozen layer, another one in eval mode, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.still = nn.BatchNorm1d(8).eval()
        self.head = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.register_buffer("mask", None)
        self.register_buffer("cache", torch.zeros(2))
        self.average = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mask = torch.ones(len(x))  # buffers made and replaced in the forward, and plain attributes
        if len(x) > len(self.cache):
            self.cache = torch.arange(len(x))
        self.average = 0.9 * self.average + 0.1 * len(x)
        self.last_seen = len(x)
        return self.head(self.still(self.frozen(self.body(x))))


def trace(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All there is of a training state, as bytes."""
    tensors = [*model.parameters(), *model.buffers()]
    states = [state for _, state in sorted(optimizer.state_dict()["state"].items())]
    flat = [value for state in states for _, value in sorted(state.items())]
    return [
        [tensor.detach().numpy().tobytes() for tensor in tensors],
        [v.numpy().tobytes() if isinstance(v, torch.Tensor) else v for v in flat],
        copy.deepcopy(optimizer.state_dict()["param_groups"]),
        [{k: v for k, v in vars(m).items() if isinstance(v, bool | int | float)} for m in model.modules()],
        [sorted(vars(module)) for module in model.modules()],
        [name for name, _ in model.named_buffers()],
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        str(np.random.get_state()),
    ]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    ],
    ids=["sgd", "adamw", "lr in a tensor"],
)
def test_a_probe_leaves_no_trace(make: Callable[[Any], torch.optim.Optimizer], trained: bool) -> None:
    torch.manual_seed(3)
    model = Everything().double()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    if trained:
        model(torch.ones(4, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.body[2].eval()  # somebody else's choice
    before = trace(model, optimizer)
    result, _ = find(model, optimizer, line(30), start=64)  # which fails
    assert result.largest >= 29
    assert trace(model, optimizer) == before


class Odd(nn.Module):
    """What is easily put back wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)
        self.scripted = torch.jit.script(nn.BatchNorm1d(5))
        self.register_buffer("expanded", torch.zeros(3).expand(5, 3))
        self.register_buffer("growing", torch.zeros(2))
        self.last = torch.zeros(1, 5)
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.linear.weight.detach()  # another tensor, which is the weight's memory
        self.growing.data = torch.rand(len(x), generator=self.generator)
        return self.linear(self.scripted(x))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_odd_things_are_put_back_too() -> None:
    model = Odd().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.state["a word"] = 3  # type: ignore[index]
    last, drawn = model.last, model.generator.get_state()
    before = [p.detach().clone() for p in model.parameters()]
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    find(model, optimizer, line(30))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert {n: b.tolist() for n, b in model.named_buffers()} == {n: b.tolist() for n, b in buffers.items()}
    assert model.last is last
    assert not last.any()
    assert torch.equal(model.generator.get_state(), drawn)
    assert optimizer.state["a word"] == 3  # type: ignore[index]


class Greedy(torch.optim.AdamW):
    """Runs out of memory while its state is made."""

    failures = 2  # in the step without rows, and in the first one with some

    def step(self, closure: Any = None) -> Any:
        if self.failures:
            self.failures -= 1
            for group in self.param_groups:
                self.state[group["params"][0]]["step"] = torch.tensor(0.0)  # half of it
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().step(closure)


def test_an_optimizer_that_runs_out_of_memory_halfway_is_put_in_order() -> None:
    model = small_model()
    optimizer = Greedy(model.parameters(), lr=0.1)
    before = trace(model, optimizer)
    result, _ = find(model, optimizer, line(30), start=16)
    assert [each.fraction is None for each in result.tried[:2]] == [True, False]
    assert trace(model, optimizer) == before


def test_weights_stand_still_while_memory_is_probed() -> None:
    """At the LR of the run, without its warm-up, they might diverge."""
    model = small_model()
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6, momentum=0.9, weight_decay=1.0)
    optimizer.register_step_post_hook(lambda *_: seen.append(flat_weights(model)))
    before = flat_weights(model)
    find(model, optimizer, line(30))
    assert seen
    for weights in seen:
        np.testing.assert_array_equal(weights, before)


def test_training_goes_on_as_if_nothing_had_been_probed() -> None:
    runs = []
    for probes in (False, True):
        model, loop = training_loop(table(60), BatchPlan.fit(8, 1))
        loop.train_epoch(squared_error(model))
        if probes:  # from a later epoch, with the optimizer's state there
            memory = SimulatedMemory(model, line(40))
            whole = Probe(model, loop._step, MixedPrecision("fp64", CPU), World(0, 1, CPU), memory)
            result = whole.find(memory.loss, loop._feed.largest, start=8, most=1000)
            assert result.largest >= 39
            assert len(result.tried) <= 5
        loop.train_epoch(squared_error(model))
        runs.append(flat_weights(model))
    np.testing.assert_array_equal(*runs)


def _on_two_ranks() -> tuple[int, list[tuple[int, float | None]]]:
    world = World.current()
    model = small_model()
    peak = line(300) if world.rank == 0 else line(41)
    result, _ = find(model, adam(model), peak, start=16, world=world)
    return result.largest, [(t.micro_batch_size, t.fraction) for t in result.tried]


def test_the_fullest_rank_counts_and_nobody_hangs() -> None:
    (largest, tried), other = run_ranks(_on_two_ranks, 2)
    assert (largest, tried) == other
    assert 40 <= largest <= 41
    assert len(tried) <= 5


def _failing() -> str:
    world = World.current()
    model = small_model()

    def peak(rows: int) -> float:
        if world.rank == 1:
            raise ValueError("no luck")
        return line(30)(rows)

    try:
        find(model, adam(model), peak, world=world)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_loss_that_wants_pairs_of_rows_is_probed_with_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """From below, as on the CPU: one row alone is no batch of it, and no reason to stop."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(SimulatedMemory, "ends_at", 1 / (1 - HEADROOM))

    def pairs(rows: int) -> float:
        if rows < 3:
            raise ValueError("no pairs")
        return 1e-4

    result, sizes = timed(clock, pairs, maximum=100)
    assert 97 <= result.largest <= 100
    assert max(sizes) <= 110
    assert min(sizes) == 4

    def never(rows: int) -> float:
        raise ValueError("no pairs")

    with pytest.raises(ValueError, match="no pairs"):
        timed(clock, never)


def test_a_size_that_fails_and_that_the_run_can_do_without_is_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A probe does not end a run that would have trained."""
    clock = Clock(monkeypatch)

    def few(rows: int) -> float:
        if rows > 50:
            raise ValueError("positions\nonly up to 50")
        return 1e-4

    result, _ = timed(clock, few)
    assert 40 <= result.largest <= 50
    assert result.limit == "memory"
    said = " rows in one forward are not taken, since they failed: ValueError: positions only up to 50"
    assert result.notes()[-1].endswith(said)


def test_a_loss_that_is_no_number_for_one_row_spoils_no_other_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedMemory, "ends_at", 1 / (1 - HEADROOM))
    model = small_model()
    memory = SimulatedMemory(model, line(100))

    def loss(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        if not all(bool(p.isfinite().all()) for p in model.parameters()):
            raise ValueError("weights are no numbers")
        total, rows = memory.loss(batch)
        return total * (torch.nan if rows < 2 else 1), rows

    precision = MixedPrecision("fp64", CPU)
    step = OptimizerStep(model, adam(model), World(0, 1, CPU), precision)
    feed = IndexedFeed(
        ColumnStore([table(50)]), rank=0, plan=BatchPlan.fit(4, 1), seed=0, shuffle="full", device=CPU
    )
    whole = Probe(model, step, precision, World(0, 1, CPU), memory)
    assert whole.find(loss, feed.largest, start=16, most=1000).largest >= 97


@pytest.mark.parametrize(("measure", "largest"), [(None, 100), ("successive", 52), ("pieces", 52)])
def test_what_measuring_noise_keeps_counts(measure: Measure | None, largest: int) -> None:
    """The gradient of the step before, or Adam's metric: the first measured step must not run out."""
    model, precision = small_model(), MixedPrecision("fp64", CPU)
    step = OptimizerStep(model, adam(model), World(0, 1, CPU), precision, preconditioned=measure == "pieces")

    def kept() -> bool:
        return step.noise.kept is not None or step.gradients._weights is not None

    memory = SimulatedMemory(model, lambda rows: line(100)(rows) + (5e9 if kept() else 0))
    feed = IndexedFeed(
        ColumnStore([table(50)]), rank=0, plan=BatchPlan.fit(4, 1), seed=0, shuffle="full", device=CPU
    )
    whole = Probe(model, step, precision, World(0, 1, CPU), memory, measure=measure)
    found = whole.find(memory.loss, feed.largest, start=16, most=1000)
    assert 0.97 * largest <= found.largest <= largest
    assert not kept()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("auto", "none", 1, False), None),
        (("auto", "split", 1, False), None),
        (("auto", "successive", 1, False), "successive"),
        (("auto", "successive", 2, False), None),
        ((10, "none", 2, True), "pieces"),
        ((10, "successive", 1, True), "successive"),
        ((None, "successive", 1, True), None),
    ],
)
def test_what_of_it_is_kept(given: tuple[Any, Any, int, bool], expected: Measure | None) -> None:
    every, lone, world_size, preconditioned = given
    assert takes_memory(every, lone, world_size, preconditioned=preconditioned) == expected


def test_modes_are_those_of_the_loop() -> None:
    """A frozen BatchNorm stays in its evaluation mode, also while memory is probed."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 1)).double()
    modes = []
    model[1].register_forward_hook(lambda module, *_: modes.append(module.training))
    result, _ = find(model, adam(model), line(30), most=1, start=1)
    assert result.largest == 1
    assert set(modes) == {False}


def _no_number_on_one_rank() -> list[Any]:
    """A rank whose loss of few rows is no number: the ranks agree, instead of waiting for each other."""
    world = World.current()
    SimulatedMemory.ends_at = 1 / (1 - HEADROOM)
    model = small_model()
    memory = SimulatedMemory(model, line(100))

    def loss(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        total, rows = memory.loss(batch)
        return total * (torch.nan if rows < 4 and world.rank == 1 else 1), rows

    step = OptimizerStep(model, adam(model), world, MixedPrecision("fp64", CPU))
    whole = Probe(model, step, MixedPrecision("fp64", CPU), world, memory)
    found = whole.find(
        loss,
        lambda rows: {"x": torch.ones(rows, 5).double(), "y": torch.ones(rows, 1).double()},
        start=16,
        most=1000,
    )
    return [each.micro_batch_size for each in found.tried]


def test_a_loss_that_is_no_number_on_one_rank_holds_up_no_other() -> None:
    one, other = run_ranks(_no_number_on_one_rank, 2)
    assert one == other
    assert one[0] == 4
    assert one[-1] >= 97


def test_where_the_start_runs_out_a_loss_that_wants_pairs_is_still_probed() -> None:
    model = small_model()
    memory = SimulatedMemory(model, line(9))

    def loss(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        if len(batch["y"]) < 2:
            raise ValueError("no pairs")
        return memory.loss(batch)

    step = OptimizerStep(model, adam(model), World(0, 1, CPU), MixedPrecision("fp64", CPU))
    feed = IndexedFeed(
        ColumnStore([table(50)]), rank=0, plan=BatchPlan.fit(4, 1), seed=0, shuffle="full", device=CPU
    )
    whole = Probe(model, step, MixedPrecision("fp64", CPU), World(0, 1, CPU), memory)
    assert whole.find(loss, feed.largest, start=64, most=64).largest == 9


def test_on_the_cpu_too_the_share_that_a_run_begins_with_is_tried_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An optimizer that takes seconds takes them for any number of rows."""
    monkeypatch.setattr(SimulatedMemory, "ends_at", 1 / (1 - HEADROOM))
    clock = Clock(monkeypatch)
    result, _ = timed(clock, lambda rows: 1.5 / rows + 0.05, maximum=10_000)
    assert result.largest >= 16


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_without_rows_the_optimizer_makes_its_state(precision: Any) -> None:
    """Also under fp16, whose scaler makes its scale with the first loss; a rank may have no rows."""
    model = small_model().float()
    optimizer, world = adam(model), World(0, 1, CPU)
    step = OptimizerStep(model, optimizer, world, MixedPrecision(precision, CPU))
    result = step.run([], squared_error(model), rows=1, adjustment=sizes.STILL)
    assert result.applied
    assert len(optimizer.state) == len(list(model.parameters()))
    parameters = sum(p.nbytes for p in model.parameters())
    assert 3 * parameters <= step.held_bytes <= 3 * parameters + 64


def test_models_beside_it_are_reserved_for() -> None:
    """Seeds of a trial train in one process: weights, gradients and Adam's two moments of each."""
    model, precision = small_model(), MixedPrecision("fp64", CPU)
    step = OptimizerStep(model, adam(model), World(0, 1, CPU), precision)
    memory = SimulatedMemory(model, line(100))
    feed = IndexedFeed(
        ColumnStore([table(50)]), rank=0, plan=BatchPlan.fit(4, 1), seed=0, shuffle="full", device=CPU
    )
    Probe(model, step, precision, World(0, 1, CPU), memory, siblings=3).find(
        memory.loss, feed.largest, start=16, most=100
    )
    each = 4 * sum(p.nbytes for p in model.parameters())
    assert 3 * each <= memory.reserved_bytes <= 3 * each + 500
    gauge = MemoryGauge(World(0, 1, CPU), HEADROOM)
    before = gauge.peak().used_bytes
    gauge.reserved_bytes = 10**12
    assert gauge.peak().used_bytes - before == pytest.approx(1e12, rel=0.01)


def test_a_probe_whose_loss_fails_is_told_and_not_raised() -> None:
    """Copies of one row may be no batch of a loss that needs different ones."""

    def fails() -> ProbeResult:
        raise ValueError("no\nnegatives")

    found, notes = unless_it_fails(fails)
    assert found is None
    assert notes == [
        "memory: not probed, since the loss failed on copies of the largest row: ValueError: no negatives"
    ]

    def too_large() -> ProbeResult:
        raise ConfigError("not even one")

    with pytest.raises(ConfigError):
        unless_it_fails(too_large)


def test_another_error_than_memory_is_raised_where_it_came_from() -> None:
    assert run_ranks(_failing, 2) == [
        "OtherRankFailedError: another rank failed while 16 rows were probed",
        "ValueError: no luck",
    ]


class Ragged(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.ones(400 if row == 13 else row + 1)


def count_rows(store: ColumnStore, monkeypatch: pytest.MonkeyPatch) -> int:
    """Most rows that are copied at once to find the largest one, which is still found."""
    found, gather = [], store.gather
    with monkeypatch.context() as patch:
        patch.setattr(store, "gather", lambda rows: found.append(len(rows)) or gather(rows))
        assert store.largest_row() == 17
    return max(found)


def test_the_largest_rows_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = DatasetStore(Ragged(), lambda rows: {"flat": torch.cat(rows), "rows": len(rows)})
    feed = IndexedFeed(store, rank=0, plan=BatchPlan.fit(4, 1), seed=0, shuffle="full", device=CPU)
    assert feed.largest(3)["flat"].shape == (1200,)
    wrapped = DatasetStore(Ragged(), lambda rows: UserDict(flat=torch.cat(rows)))  # as of transformers
    assert wrapped.largest_row() == 13
    padded = np.zeros((30, 6))
    padded[:, :2] = 1
    padded[17] = 1
    import pyarrow as pa

    column = pa.FixedSizeListArray.from_arrays(pa.array(padded.reshape(-1)), 6)
    store = ColumnStore([pa.table({"tokens": column})])
    assert store.largest_row() == 17
    for at_once in (1, 48, 100, 480):  # rows have 48 bytes; large ones are not all copied at once
        monkeypatch.setattr(columns, "BYTES_AT_ONCE", at_once)
        looked_at = [count_rows(store, monkeypatch)]
        assert looked_at[0] <= max(at_once // 48, 1) + 1
    monkeypatch.setattr(columns, "MOST_BYTES_LOOKED_AT", 48 * 3)
    assert store.largest_row() in (0, 14, 29)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: out of memory\nCompile with ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to ..."), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), True),
        (
            RuntimeError(
                "CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous"
            ),
            False,
        ),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (MemoryError(), True),
        (IndexError("index out of range in self"), False),
        (RuntimeError("index out of range"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_what_is_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


LIMITED = """
import resource, sys
import torch
from torch import nn
from ray_dynbs.training.memory import PeakMeter
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.gauge import MemoryGauge
from ray_dynbs.training.probe import Probe
from ray_dynbs.training.step import OptimizerStep
from ray_dynbs.training.world import World

torch.set_num_threads(1)
cpu, world = torch.device("cpu"), World(0, 1, torch.device("cpu"))
model = nn.Linear(20_000, 4)
optimizer = torch.optim.Adam(model.parameters())
precision = MixedPrecision("fp32", cpu)
step = OptimizerStep(model, optimizer, world, precision)

def loss(batch):
    return model(batch).square().sum(), len(batch)

def train(rows):
    with step.alone():
        from ray_dynbs.core.lr import Adjustment
        for _ in range(3):
            batches = (torch.ones(rows, 20_000) for _ in range(2))
            step.run(batches, loss, rows=2 * rows, adjustment=Adjustment())

train(8)
"""
BY_ADDRESSES = """
size = int(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmSize"))) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 400 * 2**20, size + 400 * 2**20))
"""
FINDS = """
probe = Probe(model, step, precision, world, MemoryGauge(world, 0.1))
found = probe.find(loss, lambda rows: torch.ones(rows, 20_000), start=64, most=1_000_000)
print(found.largest, len(found.tried), flush=True)
train(found.largest)
print("trained", flush=True)
"""
TAKES_TOO_MUCH = """
try:
    train(4 * found.largest)
except (RuntimeError, MemoryError) as error:
    print("too much:", type(error).__name__)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_real_limit_of_the_address_space() -> None:
    """One process that may take 400 MiB more: what is found trains, four times as much does not."""
    code, lines, err = run_script(LIMITED, BY_ADDRESSES, FINDS, TAKES_TOO_MUCH)
    assert code == 0, err
    found, trained, failed = lines
    assert int(found.split()[0]) > 500
    assert (trained, failed) == ("trained", "too much: RuntimeError")


def test_a_real_control_group() -> None:
    """A process that may hold 1 GiB: what is found trains and stays below; twice as much is killed."""
    with control_group(2**30) as group:
        code, lines, err = run_script(LIMITED, FINDS, limited_by=group)
        assert code == 0, err
        assert lines[1:] == ["trained"]
        found, tries = map(int, lines[0].split())
        assert tries <= 12
        assert group.kills == 0
        code, lines, err = run_script(LIMITED, f"train({2 * found})", limited_by=group)
        assert (code, group.kills) == (-signal.SIGKILL, 1)


def test_the_gauge_of_this_machine() -> None:
    gauge = MemoryGauge(World(0, 1, CPU), HEADROOM)
    gauge.reset()
    before = gauge.peak()
    assert 0 < before.fraction < 1
    large = torch.ones(50 * 2**20)
    assert large.sum() > 0
    assert gauge.peak().used_bytes - before.used_bytes > 150 * 2**20
    assert PeakMeter(CPU).peak_bytes() > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
