"""How often gradient noise is measured: as often as asked, or as often as it costs next to nothing."""

from __future__ import annotations

import math
from typing import Literal

import torch

from ray_dynbs.core.estimators.pieces import Lone
from ray_dynbs.training.noise import Measure
from ray_dynbs.training.stopwatch import Stopwatch
from ray_dynbs.training.world import World

BUDGET = 0.02
"""Share of step time that measuring may cost, amortised."""
FIRST_SPLIT_EVERY, MOST_EVERY = 10, 1_000
Every = int | Literal["auto"] | None


def takes_memory(every: Every, lone: Lone, world_size: int, *, preconditioned: bool) -> Measure | None:
    """What a run measures that takes as much memory as all gradients, and keeps it from one step to the next.

    Args:
        every: As for :class:`Measuring`.
        lone: Likewise.
        world_size: Ranks.
        preconditioned: Whether the norms are those of Adam's metric, which is kept.
    """
    if every is None:
        return None
    if lone == "successive" and world_size == 1:
        return "successive"
    return "pieces" if preconditioned else None


class Measuring:
    """Decides which steps are measured, the same ones on all ranks.

    Args:
        every: Every so many steps; ``auto`` keeps the cost at :data:`BUDGET` of step time; ``None`` never.
        world: The ranks.
        lone: What to do on one rank where a step is a lone micro-batch.
    """

    def __init__(self, every: Every, world: World, lone: Lone = "none") -> None:
        self._auto, self._world, self._lone = every == "auto", world, lone
        # Ranks are pieces already; one rank may have to split its micro-batch for them, which costs more.
        first = 1 if world.size > 1 else FIRST_SPLIT_EVERY
        self.every: int | None = first if every == "auto" else every
        self._new_watches()

    def _new_watches(self) -> None:
        self.own = Stopwatch(self._world.device)
        self.measured_steps = Stopwatch(self._world.device)
        self.plain_steps = Stopwatch(self._world.device)

    def due(self, step: int) -> bool:
        """Whether a step, counted from 0 over the run, is measured."""
        return self.every is not None and step % self.every == 0

    def of_step(self, step: int, rows: int, num_micro_batches: int) -> Measure | None:
        """What to measure of a step.

        Args:
            step: Counted from 0 over the run.
            rows: Of it, over all ranks.
            num_micro_batches: Of this rank.
        """
        pieces = self._world.size > 1 or num_micro_batches > 1 or self._lone == "split"
        if pieces and rows > 1:
            return "pieces" if self.due(step) else None
        if self._lone == "none":
            return None
        return "successive" if self.due(step) else "keep" if self.due(step + 1) else None

    def splits(self, measure: Measure | None) -> bool:
        """Whether a lone micro-batch is cut in two for that."""
        return measure == "pieces" and self._lone == "split" and self._world.size == 1

    def adapt(self, steps: int) -> None:
        """At a pass's end, on every rank: measure more or less often from now on.

        Args:
            steps: Of the pass; in the next one at least two are measured, whatever it costs.
        """
        if self._auto:
            wanted = torch.tensor([float(self._affordable())], device=self._world.device)
            agreed = int(self._world.max_(wanted).item())
            self.every = min(agreed or self.every or 1, max(steps // 2, 1))
        self._new_watches()

    def _affordable(self) -> int:
        """Steps from one measurement to the next; 0 where nothing is known."""
        plain, measured, own = (w.mean_s() for w in (self.plain_steps, self.measured_steps, self.own))
        step_s = plain or measured
        if not step_s or (own is None and measured is None):
            return 0
        cost_s = own or 0.0
        if self._world.size == 1 and plain and measured:  # a split micro-batch costs in the forward too
            cost_s = max(cost_s, measured - plain)
        return min(max(math.ceil(cost_s / (BUDGET * step_s)), 1), MOST_EVERY)
