"""Telling "out of memory" from all other errors, and getting the memory back afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import torch

_MESSAGES = (
    "CUDA error: out of memory",
    "CUDA out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "MPS backend out of memory",
    "XPU out of memory",
    "NVML_SUCCESS == r",  # the allocator's assertion where even its question fails
)
_CUDNN = "CUDNN_STATUS_NOT_SUPPORTED"
"""What cuDNN says for lack of workspace, but also of layouts that it does not know."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: a smaller batch may do.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    >>> is_out_of_memory(IndexError("index out of range in self"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if any(message in text for message in _MESSAGES):
        return True
    return _CUDNN in text and "non-contiguous" not in text


def free_memory(device: torch.device) -> None:
    """Give back what nothing refers to; outside of the ``except`` block, whose traceback holds tensors."""
    gc.collect()
    empty_cache(device)


def empty_cache(device: torch.device) -> None:
    """Give back what the allocator keeps for later; takes no time, where collecting garbage takes 0.1 s."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "xpu":
        torch.xpu.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    else:
        _trim()


def _trim() -> None:
    """Let the C library hand its free pages back to the system, where it has a way to."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
