"""Seconds per use of a piece of work, on devices that work on their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MOST_EVENTS = 50


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
