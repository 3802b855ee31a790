"""How full the memory is: real use over real capacity, of the device this rank computes on.

Where nothing limits a process but the machine, that is the machine; in a container it is the tightest limit
of the control groups around it; on an accelerator the device, with what other processes hold of it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ray_dynbs.training.cgroups import Limit, tightest_limit
from ray_dynbs.training.oom import free_memory

MONITOR, MONITOR_DEFAULT = "RAY_memory_usage_threshold", 0.95
"""Ray kills workers above this fraction of the host's or container's memory."""
REFRESHED = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MemoryReading:
    """Memory of a device, in bytes.

    Attributes:
        used_bytes: Held by anybody, what can be dropped at once left out.
        total_bytes: All there is: of the device, the container, or the host.
        own_bytes: Held by this process.
        source: What was asked, in words.
        doubts: What could not be read.
    """

    used_bytes: int
    total_bytes: int
    own_bytes: int
    source: str
    doubts: tuple[str, ...] = ()

    @property
    def fraction(self) -> float:
        """In use over there is, in [0, 1]."""
        return min(max(self.used_bytes / max(self.total_bytes, 1), 0.0), 1.0)


def read_memory(device: torch.device) -> MemoryReading:
    """Ask for the memory of a device.

    Args:
        device: CPU, CUDA, XPU or MPS.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        return MemoryReading(total - free, total, own, torch.cuda.get_device_name(device))
    if device.type == "xpu":
        free, total = torch.xpu.mem_get_info(device)
        return MemoryReading(total - free, total, torch.xpu.memory_reserved(device), "XPU")
    if device.type == "mps":
        total, own = torch.mps.recommended_max_memory(), torch.mps.driver_allocated_memory()
        return MemoryReading(own, total, own, "MPS, recommended maximum")
    return read_host_memory()


def read_host_memory(limit: Limit | None = None) -> MemoryReading:
    """Memory of the container, where its limit is below the host's memory; else of the host.

    Args:
        limit: The container's; looked for if left out.
    """
    host, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
    limit = tightest_limit() if limit is None else limit
    if limit.max_bytes is not None and limit.max_bytes < host.total:
        return MemoryReading(limit.used_bytes, limit.max_bytes, own, limit.source, doubts=limit.doubts)
    return MemoryReading(host.total - host.available, host.total, own, "host", doubts=limit.doubts)


def memory_fraction(device: torch.device) -> float:
    """Memory in use over memory there is, in [0, 1]."""
    return read_memory(device).fraction


def usable_fraction(device: torch.device, headroom: float) -> float:
    """What of the memory may be used, in (0, 1): less head-room, and below where Ray kills.

    Args:
        device: Whose memory.
        headroom: Fraction to keep free.
    """
    if device.type in ("cuda", "xpu", "mps"):
        return 1.0 - headroom
    try:
        monitor = float(os.environ.get(MONITOR, MONITOR_DEFAULT))
    except ValueError:
        monitor = MONITOR_DEFAULT
    return min(1.0, monitor) * (1.0 - headroom)


class PeakMeter:
    """The most memory that this process has held of a device since :meth:`reset`.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def doubts(self) -> tuple[str, ...]:
        """What makes its answers too high: on the CPU, a high-water mark that cannot begin anew."""
        if self._device.type != "cpu" or os.access(REFRESHED, os.W_OK):
            return ()
        return (f"{REFRESHED}: may not be written, so peaks are those since this process began",)

    def reset(self) -> None:
        """Forget what was, and give back what is free."""
        if self._device.type in ("cuda", "xpu"):
            torch.accelerator.synchronize(self._device)
            module = torch.cuda if self._device.type == "cuda" else torch.xpu
            module.empty_cache()
            module.reset_peak_memory_stats(self._device)
        elif self._device.type == "cpu":
            free_memory(self._device)  # what an allocator keeps of the last size is no part of the next one
            with contextlib.suppress(OSError):
                REFRESHED.write_text("5")  # Linux: the high-water mark begins anew

    def peak_bytes(self) -> int:
        """In bytes; on devices that keep no record, what is held now."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return int(torch.cuda.max_memory_reserved(self._device))
        if self._device.type == "xpu":
            torch.xpu.synchronize(self._device)
            return int(torch.xpu.max_memory_reserved(self._device))
        if self._device.type == "mps":
            return int(torch.mps.driver_allocated_memory())
        return max(_high_water_mark(), int(psutil.Process().memory_info().rss))


def _high_water_mark() -> int:
    """Of this process's resident memory, where Linux tells; 0 elsewhere."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) * 1024 if lines else 0
