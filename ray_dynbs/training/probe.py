"""Probing memory: real steps at several micro-batch sizes, which leave no trace.

Every size is trained for real (forward, backward, optimizer, two micro-batches a step, so that the next
one's rows are there beside the last one's; at an LR of 0, so that nothing diverges), on every rank by itself,
without any collective: a rank that runs out of memory holds up no other. After each size the ranks agree on
the fullest memory and the slowest time among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.probed import FASTER, Limit, ProbeResult, SizeTried, faster_sizes
from ray_dynbs.core.probing import MicroBatchSearch
from ray_dynbs.core.units import gib
from ray_dynbs.training.gauge import Gauge
from ray_dynbs.training.noise import Measure
from ray_dynbs.training.oom import free_memory
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.sizes import STEPS, MakeBatch, SizeRunner
from ray_dynbs.training.snapshot import Snapshot
from ray_dynbs.training.step import LossFn, OptimizerStep
from ray_dynbs.training.world import World

MOST_S = 10.0
"""Longest that a size may take to be tried, in seconds: a forward of a quarter of that gains nothing more."""
MOST_HALVES = 8
ROUNDS = 5
"""Times that two sizes are compared, in turn, where the smaller one seems to be faster."""


def unless_it_fails(probe: Callable[[], ProbeResult]) -> tuple[ProbeResult | None, list[str]]:
    """What a probe found, and what to say of it; nothing where the loss fails, which a first step will tell.

    It may be the probe's fault, whose batches are copies of the largest row.

    Args:
        probe: Probes, on every rank.

    Raises:
        ConfigError: not even one row fits.
    """
    try:
        found = probe()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  # on all ranks alike
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return None, [f"memory: not probed, since the loss failed on copies of the largest row: {reason}"]
    return found, found.notes()


class Probe:
    """Finds the largest micro-batch that fits, on all ranks together.

    Args:
        model: The plain model.
        step: The optimizer step over it.
        precision: Its loss scaler.
        world: The ranks.
        gauge: Measures the memory.
        measure: What the run's steps measure that takes memory (``measuring.takes_memory``).
        siblings: Models like this one that will be in this memory too, none of them yet.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        step: OptimizerStep,
        precision: MixedPrecision,
        world: World,
        gauge: Gauge,
        *,
        measure: Measure | None = None,
        siblings: int = 0,
    ) -> None:
        self._model, self._step, self._precision = model, step, precision
        self._world, self._gauge, self._measure, self._siblings = world, gauge, measure, siblings

    def find(
        self,
        loss_fn: LossFn,
        make_batch: MakeBatch,
        *,
        start: int,
        most: int,
        sweep: bool = False,
    ) -> ProbeResult:
        """Search, on every rank alike; afterwards everything is as it was.

        Args:
            loss_fn: Loss sum and weight of a micro-batch.
            make_batch: Rows -> a micro-batch of so many of the largest rows there are.
            start: First size to try.
            most: Largest size allowed.
            sweep: Time sizes below the answer too, halving it, and say whether one of them is faster.

        Raises:
            ConfigError: not even one row fits; says how much it takes.
            OtherRankFailedError: another rank failed, which has the reason.
        """
        runner = SizeRunner(self._step, self._world, self._gauge, loss_fn, make_batch, measure=self._measure)
        before = Snapshot(self._model, self._step.optimizers, self._precision, self._world.device)
        try:
            runner.settle(before)
            if self._siblings:
                self._gauge.reserved_bytes = self._siblings * (_held(self._model) + self._step.held_bytes)
                runner.settle(before)
            free_memory(self._world.device)
            least = min(_least(self._model), most)
            start = max(start, least)
            if self._gauge.ends_at is not None:
                least = _first_that_runs(least, start, runner, before)
            search = MicroBatchSearch(start, most, 1.0, least, self._gauge.ends_at)
            too_long = _search(search, runner, before)
            fastest = search.best
            if sweep and search.best is not None:
                fastest = _fastest(search, runner, least)
        finally:
            before.restore()
            self._step.gradients.zero()
            self._step.noise.forget()
            self._gauge.reset()  # gives the device's cache back
        if search.best is None or fastest is None:
            raise ConfigError(_nothing_fits(runner))
        time_is_up = too_long and search.best < most
        limit: Limit | None = "memory" if search.is_limited else "time" if time_is_up else None
        return ProbeResult(
            largest=search.best,
            fastest=fastest,
            tried=tuple(runner.tried),
            most=most,
            limit=limit,
            usable_bytes=runner.usable_bytes,
            doubts=(*self._gauge.doubts, *runner.doubts),
        )


def _first_that_runs(least: int, start: int, runner: SizeRunner, before: Snapshot) -> int:
    """The smallest size that the loss can do with at all, which may want pairs of rows; ``start`` at most."""
    while least < start and (runner.fails(least) or runner.is_spoilt):
        runner.settle(before)  # a loss of one row may be no number, and with it the weights
        least = min(2 * least, start)
    return least


def _search(search: MicroBatchSearch, runner: SizeRunner, before: Snapshot) -> bool:
    """Try what the search proposes; returns whether it was cut short because sizes took too long."""
    while (rows := search.propose()) is not None:
        enough = max(_affordable(runner.tried), search.start)  # of which the run's own steps will be
        if search.ends_at_bytes is None and search.best is None and rows == search.least < search.start:
            # What the run would begin with has run out; the loss may not take as few rows as are tried next.
            search.least = rows = _first_that_runs(rows, search.start, runner, before)
        if rows > enough:  # less is tried; if that turns out to be faster, more
            if enough <= (search.best or 0) or enough in search.peaks:
                search.most = search.best or search.least
                return True
            rows = enough
        tried = runner.add(rows) if rows <= search.start else runner.try_to_add(rows)
        search.record(rows, tried.fraction, runner.rest())
        if tried.fraction is None or runner.is_spoilt:
            runner.settle(before)  # a step that was broken off may have left half of an optimizer's state
    return False


def _affordable(tried: list[SizeTried]) -> int:
    """The largest size that would not take longer than it may, by the best speed so far.

    A power of two, so that equal runs, whose timings differ by little, find the same.
    """
    speeds = [each.samples_per_s for each in tried if each.samples_per_s is not None]
    return 1 << int(math.log2(max(MOST_S * max(speeds) / (2 * STEPS), 1))) if speeds else 1 << 50


def _fastest(search: MicroBatchSearch, runner: SizeRunner, least: int) -> int:
    """The largest size that fits, or a smaller one that was faster every time the two were compared."""
    largest = search.best or least
    halves = [largest >> power for power in range(1, MOST_HALVES + 1)]
    for rows in halves:
        if rows >= least and rows not in search.peaks:
            runner.try_to_add(rows)
    in_time = _affordable(runner.tried) // largest  # what takes long scatters little
    for rows in faster_sizes(runner.tried, largest):
        rounds = [(runner.run(rows), runner.run(largest)) for _ in range(max(min(ROUNDS, in_time), 1))]
        if all((a.samples_per_s or 0) >= FASTER * (b.samples_per_s or math.inf) for a, b in rounds):
            return rows
    return largest


def _held(model: torch.nn.Module) -> int:
    """Bytes of a model's weights and buffers."""
    return sum(each.nbytes for part in (model.parameters(), model.buffers()) for each in part)


def _least(model: torch.nn.Module) -> int:
    """Rows that a forward in training takes at least: BatchNorm has no variance of a single one."""
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm)]
    return 2 if any(norm.training for norm in norms) else 1


def _nothing_fits(runner: SizeRunner) -> str:
    one = min(runner.tried, key=lambda each: each.micro_batch_size)
    needs = "runs out of memory"
    if one.peak_bytes is not None and math.isfinite(one.peak_bytes):
        needs = f"takes {gib(one.peak_bytes)}, others' included"
    rows = "one row" if one.micro_batch_size == 1 else f"{one.micro_batch_size} rows"
    return (
        f"a micro-batch of {rows} {needs}, where {gib(runner.usable_bytes)} may be used, memory.headroom "
        "left free: the model does not fit; allowed: a smaller one, memory.activation_checkpointing, less "
        "headroom, or more memory"
    )
