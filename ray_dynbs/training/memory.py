"""How full the memory is: real use over real capacity, of the device this rank computes on."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

CGROUP_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes a number near 2**63 where there is no limit


def memory_fraction(device: torch.device) -> float:
    """Memory in use over memory there is, in [0, 1].

    On CUDA: everything held on the device, by any process, over its total. On the CPU: the
    container's use, without page cache that can be dropped, over the smaller of its limit and the
    host's memory; without a container limit, the host's own figures.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / total
    host = psutil.virtual_memory()
    container = container_memory()
    if container is not None and container[1] < host.total:
        return container[0] / container[1]
    return float((host.total - host.available) / host.total)


def container_memory(root: Path = CGROUP_ROOT) -> tuple[int, int] | None:
    """Bytes used and allowed in the cgroup mounted at ``root``, v2 or v1; ``None`` without a limit there.

    In a container that is the container's own; a limit of a nested group is not seen yet.
    """
    v2 = _read(root / "memory.max"), _read(root / "memory.current"), root / "memory.stat", "inactive_file"
    v1_root = root / "memory"
    v1 = (
        _read(v1_root / "memory.limit_in_bytes"),
        _read(v1_root / "memory.usage_in_bytes"),
        v1_root / "memory.stat",
        "total_inactive_file",
    )
    for limit, used, stat, cache_key in (v2, v1):
        if limit is not None and used is not None and limit < _NO_LIMIT_BYTES:
            return max(used - _stat(stat, cache_key), 0), limit
    return None


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
