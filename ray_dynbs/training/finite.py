"""Weights that a step without finite numbers has spoilt: noticed soon, and never trained on for hours."""

from __future__ import annotations

import time
from typing import NoReturn

import torch

from ray_dynbs.training.stats import StepStats, Totals
from ray_dynbs.training.step import OptimizerStep

LOOK_EVERY_S = 5.0
"""How long a run may go on after such a step, where looking would make the device wait."""


class FiniteWatch:
    """Looks whether all steps so far were finite.

    Args:
        stats: Of the steps.
        step: Which may leave such steps out; then only a pass without any finite step is refused.
        device: Where they are taken.
    """

    def __init__(self, stats: StepStats, step: OptimizerStep, device: torch.device) -> None:
        self._stats, self._step, self._device = stats, step, device
        self._looked = time.perf_counter()

    def look(self, epoch: int) -> None:
        """After every step where that is free, else now and then.

        Raises:
            FloatingPointError: a step was not finite.
        """
        if self._step.skips_nonfinite:
            return
        if self._device.type != "cpu":
            # The decision to wait for the device is each rank's own; what it then finds is the same.
            if time.perf_counter() - self._looked < LOOK_EVERY_S:
                return
            self._looked = time.perf_counter()
        bad = self._stats.first_bad_step()
        if bad is not None:
            _stop(bad, epoch)

    def refuse(self, totals: Totals, epoch: int) -> None:
        """Once the sums of several steps are there.

        Raises:
            FloatingPointError: a step was not finite.
        """
        if totals.first_bad_step is None or (self._step.skips_nonfinite and totals.num_finite_steps):
            return
        _stop(totals.first_bad_step, epoch)


def _stop(step: int, epoch: int) -> NoReturn:
    raise FloatingPointError(
        f"loss or gradient was not finite in step {step} (epoch {epoch}); start again with a smaller "
        "optimizer.lr, or resume with clip_grad_norm, a lower lr.max_scale or on_nonfinite: skip"
    )
