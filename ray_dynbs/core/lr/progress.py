"""How far a schedule counted in steps has come, when steps differ in size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_dynbs.core.plan import num_steps


@dataclass(frozen=True)
class ScheduleProgress:
    """The step count a plain loop at the reference batch would have reached.

    After ``rows_in_epoch`` rows of pass ``epoch`` the count is
    ``epoch * S + ceil(rows_in_epoch / B_ref)`` with ``S = ceil(num_rows / B_ref)``: once per step at
    the reference batch, as in a plain loop, and with any history of sizes the schedule ends where it
    was planned to.

    Attributes:
        num_rows: Rows in one pass, at least 1.
        reference_batch_size: Rows per step the schedule was planned with, at least 1.
    """

    num_rows: int
    reference_batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        """``S``: steps of one pass at the reference batch."""
        return num_steps(self.num_rows, self.reference_batch_size)

    def count(self, epoch: int, rows_in_epoch: int, gain: float = 0.0) -> int:
        """Scheduler steps due.

        Args:
            epoch: Pass being trained, from 0.
            rows_in_epoch: Rows of it used so far.
            gain: AdaScale's gains of all steps so far, summed up.
        """
        return epoch * self.steps_per_epoch - (-rows_in_epoch // self.reference_batch_size)


@dataclass(frozen=True)
class GainProgress(ScheduleProgress):
    """Every step counts as many as its gain (Johnson et al. 2020, arXiv 2007.05105, algorithm 2).

    At the reference batch a step's gain is 1. Beyond it the gain is at most B / B_ref, so that after the same
    passes the count is at most that of :class:`ScheduleProgress`: the schedule takes longer.
    """

    def count(self, epoch: int, rows_in_epoch: int, gain: float = 0.0) -> int:
        """Whole steps of the gain so far."""
        return math.floor(gain + 1e-9)  # sums of gains come out a little below whole numbers
