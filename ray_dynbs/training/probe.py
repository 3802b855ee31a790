"""Probing memory: real steps at several micro-batch sizes, which leave no trace.

Every size is trained for real (forward, backward, optimizer, two micro-batches a step, so that the next
one's rows are there beside the last one's; at an LR of 0, so that nothing diverges), on every rank by itself,
without any collective: a rank that runs out of memory holds up no other. After each size the ranks agree on
the fullest memory and the slowest time among them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.lr import Adjustment
from ray_dynbs.core.probed import FASTER, Limit, ProbeResult, SizeTried, faster_sizes
from ray_dynbs.core.probing import MicroBatchSearch
from ray_dynbs.core.units import gib
from ray_dynbs.training.gauge import Gauge, Peak
from ray_dynbs.training.noise import Measure
from ray_dynbs.training.oom import free_memory, is_out_of_memory
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.snapshot import Snapshot
from ray_dynbs.training.step import LossFn, OptimizerStep
from ray_dynbs.training.world import World

STEPS = 2
"""Steps per size: Adam's state appears in the first one; the last one is timed."""
MOST_S = 10.0
"""Longest that a size may take to be tried, in seconds: a forward of a quarter of that gains nothing more."""
MOST_HALVES = 8
ROUNDS = 5
"""Times that two sizes are compared, in turn, where the smaller one seems to be faster."""
STILL = Adjustment(lr=0.0)
MakeBatch = Callable[[int], Any]
_FITS, _OUT_OF_MEMORY, _FAILED = 0, 1, 2


class OtherRankFailedError(RuntimeError):
    """A probe ended because another rank failed, which has the reason."""


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
    ) -> None:
        self._model, self._step, self._precision = model, step, precision
        self._world, self._gauge, self._measure = world, gauge, measure

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


class SizeRunner:
    """Runs sizes for real.

    ``tried`` holds what :meth:`add` has run, ``is_spoilt`` says whether the last loss was no finite number,
    which has reached the weights, ``usable_bytes`` how much of the fullest memory may be used.

    Args:
        step: The optimizer step.
        world: The ranks.
        gauge: Measures the memory.
        loss_fn: Loss sum and weight of a micro-batch.
        make_batch: Rows -> a micro-batch.
        measure: What steps measure of the gradient's noise.
    """

    def __init__(
        self,
        step: OptimizerStep,
        world: World,
        gauge: Gauge,
        loss_fn: LossFn,
        make_batch: MakeBatch,
        *,
        measure: Measure | None = None,
    ) -> None:
        self._step, self._world, self._gauge = step, world, gauge
        self._loss_fn, self._make_batch, self._measure = loss_fn, make_batch, measure
        self.tried: list[SizeTried] = []
        self.doubts: list[str] = []
        self.is_spoilt = False
        self._rest = 0.0
        self.usable_bytes = math.nan

    def settle(self, before: Snapshot) -> None:
        """Take steps without any rows: optimizers make their state, and what it takes is no rows' doing.

        Args:
            before: Put back first, and where it fails: a real step will say what is wrong.
        """
        before.restore()
        self._gauge.reset()
        try:
            with self._step.alone():
                for _ in range(STEPS):  # in the second one noise is measured in the metric of that state
                    self._step.run([], self._loss_fn, rows=1, adjustment=STILL, measure=self._measure)
        except Exception:  # noqa: BLE001  # said by the first size that needs such a step
            before.restore()
        self._rest = self._fullest(self._gauge.peak()).used_bytes

    def add(self, rows: int) -> SizeTried:
        """Run a size, and keep what came of it."""
        self.tried.append(self.run(rows))
        return self.tried[-1]

    def try_to_add(self, rows: int) -> SizeTried:
        """The same of a size that a run can do without: one that fails does not fit, for whatever reason."""
        try:
            return self.add(rows)
        except Exception as error:  # noqa: BLE001  # said, and the run goes on without such sizes
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self.doubts.append(f"{rows} rows in one forward are not taken, since they failed: {reason}")
            self.tried.append(SizeTried(rows, None, None))
        free_memory(self._world.device)  # the error held the tensors of its step, and itself
        return self.tried[-1]

    def fails(self, rows: int) -> bool:
        """Whether a size fails by something else than memory, on any rank."""
        try:
            self.run(rows)
        except Exception:  # noqa: BLE001  # what also befalls larger sizes is raised there
            failed = True
        else:
            failed = False
        if failed:
            free_memory(self._world.device)
        return failed

    def run(self, rows: int) -> SizeTried:
        """Run a size on all ranks.

        Raises:
            OtherRankFailedError: another rank failed by something else than memory.
        """
        self._gauge.reset()
        seconds, problem = self._steps(rows)
        code = _FITS if problem is None else _OUT_OF_MEMORY if is_out_of_memory(problem) else _FAILED
        worst = torch.tensor([float(code), seconds], dtype=torch.float64, device=self._world.device)
        agreed, slowest = self._world.max_(worst).tolist()
        if agreed == _FAILED:
            if code == _FAILED and problem is not None:
                raise problem
            raise OtherRankFailedError(f"another rank failed while {rows} rows were probed")
        problem = None  # its traceback holds the tensors of the step
        peak = self._fullest(self._gauge.peak())
        self.usable_bytes = peak.usable_bytes
        if agreed == _OUT_OF_MEMORY:
            free_memory(self._world.device)
            return SizeTried(rows, None, None)
        return SizeTried(rows, peak.fraction, 2 * rows / max(slowest, 1e-9), peak.used_bytes)

    def rest(self) -> float:
        """What a step without any rows takes, over what may be used, on the fullest rank.

        A backward makes dense gradients before it adds them up, of which the largest counts twice.
        """
        return (self._rest + 2 * self._step.gradients.largest_bytes) / self.usable_bytes

    def _fullest(self, peak: Peak) -> Peak:
        """Of all ranks' memories, the one that has the least left of what may be used."""
        peaks: list[Peak] = self._world.gather_objects(peak)
        return max(peaks, key=lambda each: each.fraction)

    def _steps(self, rows: int) -> tuple[float, BaseException | None]:
        """Some steps; returns the seconds that the last one took, and what went wrong, if anything."""
        seconds = 0.0
        try:
            with self._step.alone():
                for _ in range(STEPS):
                    started = time.perf_counter()
                    batches = (self._make_batch(rows) for _ in range(2))
                    result = self._step.run(
                        batches, self._loss_fn, rows=2 * rows, adjustment=STILL, measure=self._measure
                    )
                    self.is_spoilt = not math.isfinite(result.loss_sum.item())  # waits for the device
                    seconds = time.perf_counter() - started
        except Exception as error:  # noqa: BLE001  # sorted by the caller, who speaks with the other ranks
            return seconds, error
        return seconds, None


def _first_that_runs(least: int, start: int, runner: SizeRunner, before: Snapshot) -> int:
    """The smallest size that the loss can do with at all, which may want pairs of rows; ``start`` at most."""
    while least < start and (runner.fails(least) or runner.is_spoilt):
        runner.settle(before)  # a loss of one row may be no number, and with it the weights
        least = min(2 * least, start)
    return least


def _search(search: MicroBatchSearch, runner: SizeRunner, before: Snapshot) -> bool:
    """Try what the search proposes; returns whether it was cut short because sizes took too long."""
    while (rows := search.propose()) is not None:
        enough = _affordable(runner.tried)
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
