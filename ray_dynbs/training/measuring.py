"""How often gradient noise is measured: as often as asked, or as often as it costs next to nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from ray_dynbs.training.world import World

BUDGET = 0.02
"""Share of step time that measuring may cost, amortised."""
FIRST_SPLIT_EVERY, MOST_EVERY, MOST_EVENTS = 10, 1_000, 50
Every = int | Literal["auto"] | None


class Stopwatch:
    """Seconds per use of a piece of work, on a device that works on its own too.

    Args:
        device: Whose time counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._total_s, self._uses = 0.0, 0

    @contextmanager
    def timing(self, *, only: bool = True) -> Iterator[None]:
        """Time one use; on a GPU by events, only the first ones, which are read when the device is done.

        Args:
            only: Time it only where this holds.
        """
        if only and not self._on_device:
            started = time.perf_counter()
            yield
            self._total_s += time.perf_counter() - started
            self._uses += 1
            return
        if not only or len(self._events) >= MOST_EVENTS:
            yield
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._events.append((start, end))

    def mean_s(self) -> float | None:
        """Seconds per use so far, ``None`` without one; after the device has finished."""
        if self._on_device:
            times = [start.elapsed_time(end) / 1e3 for start, end in self._events]
            return sum(times) / len(times) if times else None
        return self._total_s / self._uses if self._uses else None


class Measuring:
    """Decides which steps are measured, the same ones on all ranks.

    Args:
        every: Every so many steps; ``auto`` keeps the cost at :data:`BUDGET` of step time; ``None`` never.
        world: The ranks.
    """

    def __init__(self, every: Every, world: World) -> None:
        self._auto, self._world = every == "auto", world
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
