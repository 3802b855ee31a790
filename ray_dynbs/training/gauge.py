"""How full a memory is at its peak, over all ranks that share it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Protocol

import torch

from ray_dynbs.training.memory import PeakMeter, read_memory, usable_fraction
from ray_dynbs.training.world import World


@dataclass(frozen=True)
class Peak:
    """The most that was held of a memory.

    Attributes:
        used_bytes: By all ranks that share it, and by others.
        usable_bytes: What may be used of it.
    """

    used_bytes: float
    usable_bytes: float

    @property
    def fraction(self) -> float:
        """Used over usable; above 1 it does not fit."""
        return self.used_bytes / self.usable_bytes


class Gauge(Protocol):
    """Measures one rank's memory."""

    reserved_bytes: int
    """What each rank will hold besides, and does not yet."""

    @property
    def doubts(self) -> tuple[str, ...]:
        """What could not be measured as it should."""

    @property
    def ends_at(self) -> float | None:
        """The fraction of what may be used at which the process is ended; ``None``: an error is raised."""

    def reset(self) -> None:
        """A size begins."""

    def peak(self) -> Peak:
        """Since then, over all ranks that share the memory with this one; on every rank at the same time."""


class MemoryGauge:
    """The device's memory, with what other processes hold of it; on the CPU the host's or container's.

    Args:
        world: The ranks.
        headroom: Fraction of the memory to be left free.
        share: Fraction of the memory that belongs to this rank, where others, which come and go, have the
            rest: then only its own memory counts, against that fraction (on the CPU, of what others leave).
    """

    reserved_bytes = 0

    def __init__(self, world: World, headroom: float, share: float = 1.0) -> None:
        self._world, self._meter = world, PeakMeter(world.device)
        reading = read_memory(world.device)
        self.doubts = (*reading.doubts, *self._meter.doubts)
        self._where = _where(world.device)
        everybody = world.gather_objects((self._where, reading.own_bytes))
        ours = sum(own for where, own in everybody if where == self._where)
        others, total = max(reading.used_bytes - ours, 0), reading.total_bytes
        self._others = others if share == 1 else 0
        ranks_here = sum(where == self._where for where, _ in everybody) if share < 1 else 1
        if share < 1 and world.device.type == "cpu":
            total -= others
        self._total = total * min(share * ranks_here, 1.0)
        self._usable = usable_fraction(world.device, headroom) * self._total
        # The host's memory is given out without looking; who then uses too much of it is killed.
        self.ends_at = 1 / (1 - headroom) if world.device.type == "cpu" else None

    def reset(self) -> None:
        """A size begins."""
        self._meter.reset()

    def peak(self) -> Peak:
        """The ranks' peaks in this memory, and what others held before.

        Where the allocator had to give back what it kept, to go on, the memory was full.
        """
        mine = self._where, self._meter.peak_bytes() + self.reserved_bytes, self._meter.retries
        here = [
            (peak, retries)
            for where, peak, retries in self._world.gather_objects(mine)
            if where == self._where
        ]
        used = float(sum(peak for peak, _ in here)) + self._others
        if any(retries for _, retries in here):
            used = max(used, self._total * (1 + 1e-9))
        return Peak(used, self._usable)


def _where(device: torch.device) -> str:
    """Names a memory: ranks on the same host's CPU, or sharing a device, share it."""
    host = socket.gethostname()
    if device.type == "cuda":
        return f"{host} {torch.cuda.get_device_properties(device).uuid}"
    return f"{host} {device}"
