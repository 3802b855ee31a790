"""Probing memory: real steps at several micro-batch sizes, which leave no trace.

Every size is trained for real (forward, backward, optimizer, two micro-batches a step, so that the next
one's rows are there beside the last one's; at an LR of 0, so that nothing diverges), on every rank by itself,
without any collective: a rank that runs out of memory holds up no other. After each size the ranks agree on
the fullest memory among them.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.lr import Adjustment
from ray_dynbs.core.probing import MicroBatchSearch
from ray_dynbs.training.memory import PeakMeter, read_memory, usable_fraction
from ray_dynbs.training.oom import free_memory, is_out_of_memory
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.snapshot import Snapshot
from ray_dynbs.training.step import LossFn, OptimizerStep
from ray_dynbs.training.world import World

STEPS = 2
"""Steps per size: Adam's state appears in the first one; the last one is timed."""
MOST_HALVES = 8
STILL = Adjustment(lr=0.0)
_FITS, _OUT_OF_MEMORY, _FAILED = 0, 1, 2


@dataclass(frozen=True)
class SizeTried:
    """One size, as it went.

    Attributes:
        micro_batch_size: Rows in one forward/backward.
        fraction: Peak over what may be used, on the fullest rank; ``None`` where a rank ran out of memory.
        samples_per_s: Rows per second of one rank, the slowest; ``None`` where a rank ran out of memory.
    """

    micro_batch_size: int
    fraction: float | None
    samples_per_s: float | None


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        largest: Most rows that fit, 1 or more, run for real.
        tried: All sizes, in the order tried.
        most: Largest size that was allowed.
        is_limited: Whether memory sets a limit: a larger size was run and did not fit.
        doubts: What could not be measured as it should.
    """

    largest: int
    tried: tuple[SizeTried, ...]
    most: int
    is_limited: bool
    doubts: tuple[str, ...] = ()

    @property
    def knee(self) -> int:
        """The smallest size that fits whose speed is within 5 % of the best."""
        fitting = [
            t for t in self.tried if t.samples_per_s is not None and t.micro_batch_size <= self.largest
        ]
        best = max((t.samples_per_s or 0.0 for t in fitting), default=0.0)
        return min(t.micro_batch_size for t in fitting if (t.samples_per_s or 0.0) >= 0.95 * best)


class OtherRankFailedError(RuntimeError):
    """A probe ended because another rank failed, which has the reason."""


class Gauge(Protocol):
    """Measures one rank's memory."""

    @property
    def doubts(self) -> tuple[str, ...]:
        """What could not be measured as it should."""

    def reset(self) -> None:
        """A size begins."""

    def fraction(self) -> float:
        """The peak since then over what may be used, over all ranks that share the memory with this one."""


class MemoryGauge:
    """The device's memory, with what other processes hold of it; on the CPU the host's or container's.

    Args:
        world: The ranks.
        headroom: Fraction of the memory to be left free.
    """

    def __init__(self, world: World, headroom: float) -> None:
        self._world, self._meter = world, PeakMeter(world.device)
        self._usable = usable_fraction(world.device, headroom)
        self.doubts = (*read_memory(world.device).doubts, *self._meter.doubts)
        self._where = _where(world.device)
        rest = read_memory(world.device)
        everybody = world.gather_objects((self._where, rest.own_bytes))
        ours = sum(own for where, own in everybody if where == self._where)
        self._total, self._others = rest.total_bytes, max(rest.used_bytes - ours, 0)

    def reset(self) -> None:
        """A size begins."""
        self._meter.reset()

    def fraction(self) -> float:
        """The ranks' peaks in this memory, and what others held before, over what may be used."""
        peaks = self._world.gather_objects((self._where, self._meter.peak_bytes()))
        ours = sum(peak for where, peak in peaks if where == self._where)
        return float(ours + self._others) / (self._usable * self._total)


def _where(device: torch.device) -> str:
    """Names a memory: ranks on the same host's CPU, or sharing a device, share it."""
    host = socket.gethostname()
    if device.type == "cuda":
        return f"{host} {torch.cuda.get_device_properties(device).uuid}"
    return f"{host} {device}"


class Probe:
    """Finds the largest micro-batch that fits, on all ranks together.

    Args:
        model: The plain model.
        step: The optimizer step over it.
        precision: Its loss scaler.
        world: The ranks.
        gauge: Measures the memory.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        step: OptimizerStep,
        precision: MixedPrecision,
        world: World,
        gauge: Gauge,
    ) -> None:
        self._model, self._step, self._precision = model, step, precision
        self._world, self._gauge = world, gauge

    def find(
        self,
        loss_fn: LossFn,
        make_batch: Callable[[int], Any],
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
            sweep: Time sizes below the answer too, halving it.

        Raises:
            ConfigError: not even one row fits; says how much it takes.
            OtherRankFailedError: another rank failed, which has the reason.
        """
        before = Snapshot(self._model, self._step.optimizers, self._precision, self._world.device)
        tried: list[SizeTried] = []
        try:
            self._model.train()
            least = min(_least(self._model), most)
            search = MicroBatchSearch(max(start, least), most, target_bytes=1.0, least=least)
            while (rows := search.propose()) is not None:
                tried.append(self._try(rows, loss_fn, make_batch))
                search.record(rows, tried[-1].fraction)
                if tried[-1].fraction is None:
                    before.restore()  # a step that was broken off may have left half of an optimizer's state
            halves = _halves(search, least) if sweep else []
            tried += [self._try(rows, loss_fn, make_batch) for rows in halves]
        finally:
            before.restore()
            self._step.gradients.zero()
            self._gauge.reset()  # gives the device's cache back
        if search.best is None:
            raise ConfigError(_nothing_fits(tried))
        return ProbeResult(search.best, tuple(tried), most, search.is_limited, self._gauge.doubts)

    def _try(self, rows: int, loss_fn: LossFn, make_batch: Callable[[int], Any]) -> SizeTried:
        self._gauge.reset()
        seconds, problem = self._run(rows, loss_fn, make_batch)
        code = _FITS if problem is None else _OUT_OF_MEMORY if is_out_of_memory(problem) else _FAILED
        worst = torch.tensor([float(code), seconds], dtype=torch.float64, device=self._world.device)
        agreed, slowest = self._world.max_(worst).tolist()
        if agreed == _FAILED:
            if code == _FAILED and problem is not None:
                raise problem
            raise OtherRankFailedError(f"another rank failed while {rows} rows were probed")
        problem = None  # its traceback holds the tensors of the step
        fraction = self._agree(self._gauge.fraction())
        if agreed == _OUT_OF_MEMORY:
            free_memory(self._world.device)
            return SizeTried(rows, None, None)
        return SizeTried(rows, fraction, 2 * rows / max(slowest, 1e-9))

    def _agree(self, fraction: float) -> float:
        worst = torch.tensor([fraction], dtype=torch.float64, device=self._world.device)
        return float(self._world.max_(worst).item())

    def _run(
        self, rows: int, loss_fn: LossFn, make_batch: Callable[[int], Any]
    ) -> tuple[float, BaseException | None]:
        """Some steps; returns the seconds that the last one took, and what went wrong, if anything."""
        seconds = 0.0
        try:
            with self._step.alone():
                for _ in range(STEPS):
                    started = time.perf_counter()
                    batches = (make_batch(rows) for _ in range(2))
                    result = self._step.run(batches, loss_fn, rows=2 * rows, adjustment=STILL)
                    result.loss_sum.item()  # waits for the device
                    seconds = time.perf_counter() - started
        except Exception as error:  # noqa: BLE001  # sorted by the caller, who speaks with the other ranks
            return seconds, error
        return seconds, None


def _halves(search: MicroBatchSearch, least: int) -> list[int]:
    """The answer halved again and again, but for what was tried already."""
    halves = [(search.best or 0) >> power for power in range(1, MOST_HALVES + 1)]
    return [rows for rows in halves if rows >= least and rows not in search.peaks]


def _least(model: torch.nn.Module) -> int:
    """Rows that a forward in training takes at least: BatchNorm has no variance of a single one."""
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm)]
    return 2 if any(norm.training for norm in norms) else 1


def _nothing_fits(tried: list[SizeTried]) -> str:
    one = min(tried, key=lambda each: each.micro_batch_size)
    needs = "runs out of memory"
    if one.fraction is not None and math.isfinite(one.fraction):
        needs = f"takes {one.fraction:.0%} of what may be used"
    rows = "one row" if one.micro_batch_size == 1 else f"{one.micro_batch_size} rows"
    return f"a micro-batch of {rows} {needs}: the model does not fit; allowed: a smaller one, or more memory"
