"""How CUDA's caching allocator is set up for batches that change their size."""

from __future__ import annotations

import os

import torch

SETTING = "expandable_segments:True"
"""Segments of memory that grow: a larger micro-batch need not find room beside the holes of smaller ones."""
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables by which users set the allocator up; the first one is torch's own from 2.9 on."""


def prefer_expandable_segments(device: torch.device) -> bool:
    """Let CUDA's allocator use expandable segments, unless the environment says anything of it.

    To be called before anything is allocated on the device: what lies in other segments stays there.

    Args:
        device: Whose; only CUDA devices are set up.

    Returns:
        Whether it was.
    """
    if device.type != "cuda" or any(name in os.environ for name in NAMES):
        return False
    os.environ[NAMES[0]] = SETTING  # for processes started from here
    # torch reads the variable once, perhaps before this; and 2.9.1 ignores it (pytorch issue 183387).
    apply = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if apply is None:
        apply = torch.cuda.memory._set_allocator_settings
    apply(SETTING)
    return True
