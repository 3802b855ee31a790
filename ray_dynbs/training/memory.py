"""How full the memory is: real use over real capacity, of the device this rank computes on.

Where nothing limits a process but the machine, that is the machine; in a container it is the tightest limit
of the control groups around it; on an accelerator the device, with what other processes hold of it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ray_dynbs.training.cgroups import Limit, tightest_limit
from ray_dynbs.training.oom import empty_cache

MONITOR, MONITOR_DEFAULT = "RAY_memory_usage_threshold", 0.95
"""Ray kills workers above this fraction of the host's or container's memory."""
REFRESHED = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MemoryReading:
    """Memory of a device, in bytes.

    Attributes:
        used_bytes: Held by anybody, what can be dropped at once left out.
        total_bytes: All there is: of the device, the container, or the host.
        own_bytes: Held by this process; on the CPU its anonymous memory, without what it merely maps (files,
            Ray's object store).
        source: What was asked, in words.
        doubts: What could not be read.
        retries: Times that the allocator had to give back what it kept for later, to go on: the sign just
            before running out. 0 where there is no such count.
    """

    used_bytes: int
    total_bytes: int
    own_bytes: int
    source: str
    doubts: tuple[str, ...] = ()
    retries: int = 0

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
        own, name = torch.cuda.memory_reserved(device), torch.cuda.get_device_name(device)
        return MemoryReading(total - free, total, own, name, retries=allocator_retries(device))
    if device.type == "xpu":
        free, total = torch.xpu.mem_get_info(device)
        own = torch.xpu.memory_reserved(device)
        return MemoryReading(total - free, total, own, "XPU", retries=allocator_retries(device))
    if device.type == "mps":
        total, own = torch.mps.recommended_max_memory(), torch.mps.driver_allocated_memory()
        return MemoryReading(own, total, own, "MPS, recommended maximum")
    return read_host_memory()


def read_host_memory(limit: Limit | None = None) -> MemoryReading:
    """Memory of the container or of the host, whichever has less room left.

    Ray's object store lies in shared memory, which both count as used.

    Args:
        limit: The container's; looked for if left out.
    """
    host, own = psutil.virtual_memory(), anonymous_bytes()
    limit = tightest_limit() if limit is None else limit
    room = host.available if limit.max_bytes is None else limit.max_bytes - limit.used_bytes
    if limit.max_bytes is not None and limit.max_bytes < host.total and room <= host.available:
        return MemoryReading(limit.used_bytes, limit.max_bytes, own, limit.source, doubts=limit.doubts)
    return MemoryReading(host.total - host.available, host.total, own, "host", doubts=limit.doubts)


class MemoryWatch:
    """How full a memory is, asked again and again.

    Args:
        device: Whose.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._retries = device, read_memory(device).retries

    def fraction(self) -> float:
        """In [0, 1]; 1 where the allocator had to retry since it was last asked, however it looks now."""
        reading = read_memory(self._device)
        # A probe begins the count anew.
        retried, self._retries = reading.retries not in (0, self._retries), reading.retries
        return 1.0 if retried else reading.fraction


def allocator_retries(device: torch.device) -> int:
    """Times that the device's allocator freed its cache, so as not to run out of memory."""
    module = torch.cuda if device.type == "cuda" else torch.xpu if device.type == "xpu" else None
    return 0 if module is None else int(module.memory_stats(device).get("num_alloc_retries", 0))


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
            empty_cache(self._device)
            module.reset_peak_memory_stats(self._device)
            module.reset_accumulated_memory_stats(self._device)  # retries among them
        elif self._device.type == "cpu":
            empty_cache(self._device)  # what an allocator keeps of the last size is no part of the next one
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
        status = _status()
        mapped = status.get("RssFile", 0) + status.get("RssShmem", 0)
        return max((status.get("VmHWM") or _most_resident_bytes()) - mapped, anonymous_bytes())

    @property
    def retries(self) -> int:
        """Times since :meth:`reset` that the allocator freed its cache, so as not to run out of memory."""
        return allocator_retries(self._device)


def anonymous_bytes() -> int:
    """Memory that this process holds for itself; where the system does not tell, all that is resident."""
    return _status().get("RssAnon") or int(psutil.Process().memory_info().rss)


def _most_resident_bytes() -> int:
    """The most that was resident since this process began, where no other record is kept; 0 if unknown."""
    if sys.platform == "win32":
        return 0
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def _status() -> dict[str, int]:
    """Sizes in bytes that Linux tells of this process, by name; empty elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in words}
