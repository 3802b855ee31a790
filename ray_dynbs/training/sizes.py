"""Micro-batch sizes run for real, on every rank by itself, and what the ranks agree that came of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from ray_dynbs.core.lr import Adjustment
from ray_dynbs.core.probed import SizeTried
from ray_dynbs.training.gauge import Gauge, Peak
from ray_dynbs.training.noise import Measure
from ray_dynbs.training.oom import free_memory, is_out_of_memory
from ray_dynbs.training.snapshot import Snapshot
from ray_dynbs.training.step import LossFn, OptimizerStep
from ray_dynbs.training.world import World

STEPS = 2
"""Steps per size: Adam's state appears in the first one; the last one is timed."""
STILL = Adjustment(lr=0.0)
MakeBatch = Callable[[int], Any]
_FITS, _OUT_OF_MEMORY, _FAILED = 0, 1, 2


class OtherRankFailedError(RuntimeError):
    """A probe ended because another rank failed, which has the reason."""


class SizeRunner:
    """Runs sizes for real.

    ``tried`` holds what :meth:`add` has run, ``is_spoilt`` says whether the last loss was no finite number on
    any rank, which has reached its weights, ``usable_bytes`` how much of the fullest memory may be used.

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
            self.tried.append(SizeTried(rows, None, None, failed=True))
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
        seconds, is_finite, problem = self._steps(rows)
        code = _FITS if problem is None else _OUT_OF_MEMORY if is_out_of_memory(problem) else _FAILED
        worst = torch.tensor(
            [float(code), seconds, float(not is_finite)], dtype=torch.float64, device=self._world.device
        )
        agreed, slowest, spoilt = self._world.max_(worst).tolist()
        self.is_spoilt = spoilt > 0
        try:
            if agreed == _FAILED:
                if code == _FAILED and problem is not None:
                    raise problem
                raise OtherRankFailedError(f"another rank failed while {rows} rows were probed")
        finally:
            problem = None  # its traceback holds the tensors of the step, and this frame
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

    def _steps(self, rows: int) -> tuple[float, bool, BaseException | None]:
        """Some steps; returns the last one's seconds, whether its loss was finite, and what went wrong."""
        seconds, is_finite = 0.0, True
        try:
            with self._step.alone():
                for _ in range(STEPS):
                    started = time.perf_counter()
                    batches = (self._make_batch(rows) for _ in range(2))
                    result = self._step.run(
                        batches, self._loss_fn, rows=2 * rows, adjustment=STILL, measure=self._measure
                    )
                    is_finite = math.isfinite(result.loss_sum.item())  # waits for the device
                    seconds = time.perf_counter() - started
        except Exception as error:  # noqa: BLE001  # sorted by the caller, who speaks with the other ranks
            return seconds, is_finite, error
        return seconds, is_finite, None
