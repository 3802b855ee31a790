"""What this machine offers to training: devices, memory and its limits, precisions."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import torch

from ray_dynbs.core.units import gib
from ray_dynbs.training.allocator import NAMES, SETTING
from ray_dynbs.training.memory import MONITOR, MONITOR_DEFAULT, MemoryReading, read_host_memory, read_memory
from ray_dynbs.training.precision import computes_in_bf16

SHARED = Path("/dev/shm")


def describe_platform() -> list[tuple[str, str]]:
    """What there is, and what a run would use: (name, words), to be printed."""
    devices = accelerators()
    found = [
        ("python, torch", f"{platform.python_version()}, {torch.__version__}{_cuda_build()}"),
        ("cpu", f"{_cores()} cores for this process of {os.cpu_count()}, {torch.get_num_threads()} threads"),
        ("memory", _memory_words(read_host_memory())),
    ]
    found += [("memory, not readable", doubt) for doubt in read_host_memory().doubts]
    monitor = os.environ.get(MONITOR, f"{MONITOR_DEFAULT:g}")
    found.append(("Ray's limit", f"workers are killed above {monitor} of it ({MONITOR})"))
    if SHARED.is_dir():
        free = shutil.disk_usage(SHARED)
        found.append(("shared memory", f"{gib(free.free)} free of {gib(free.total)} for Ray's object store"))
    found += [(str(device), _device_words(device)) for device in devices] or [("accelerators", "none")]
    if any(device.type == "cuda" for device in devices):
        found.append(("allocator", _allocator_words()))
    used = devices[0] if devices else torch.device("cpu")
    found.append(("precisions", ", ".join(precisions(used))))
    found.append(("used by default", _used_words(used, len(devices))))
    return found


def accelerators() -> list[torch.device]:
    """The devices of this machine that workers may train on."""
    for kind, module in (("cuda", torch.cuda), ("xpu", torch.xpu)):
        if module.is_available():
            return [torch.device(kind, index) for index in range(module.device_count())]
    return []


def precisions(device: torch.device) -> list[str]:
    """What ``precision`` may sensibly be on a device, with what each means there."""
    bf16 = "bf16" if computes_in_bf16(device) else "bf16 (emulated, slower than fp32)"
    return ["fp32", bf16, *(["fp16"] if device.type == "cuda" else []), "fp64"]


def _device_words(device: torch.device) -> str:
    reading = read_memory(device)
    return f"{reading.source}, {gib(reading.used_bytes)} of {gib(reading.total_bytes)} in use by anybody"


def _allocator_words() -> str:
    given = [f"{name}={os.environ[name]}" for name in NAMES if name in os.environ]
    return f"{given[0]}, as the environment says" if given else f"{SETTING}, unless {NAMES[0]} says otherwise"


def _memory_words(reading: MemoryReading) -> str:
    return (
        f"{gib(reading.used_bytes)} of {gib(reading.total_bytes)} in use, {gib(reading.own_bytes)} by this "
        f"process ({reading.source})"
    )


def _used_words(device: torch.device, count: int) -> str:
    """What ``use_gpu: auto`` and ``precision: auto`` come to on this machine."""
    precision = "bf16" if computes_in_bf16(device) else "fp32"
    where = "the CPU" if device.type == "cpu" else f"{count} {device.type} device{'s' * (count > 1)}"
    return f"{where} (cluster.use_gpu: auto), precision: auto is {precision}"


def _cuda_build() -> str:
    return f" for CUDA {torch.version.cuda}" if torch.version.cuda else " without CUDA"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
