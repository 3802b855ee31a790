"""Copies of tensors on the host, large ones in a file.

A copy in memory would count as the run's own while sizes are probed, and may be what memory runs out by.
A file's pages the kernel can put onto the disk instead, and it does so only where memory is short.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile

import torch

LARGE_BYTES = 2**20
"""From here on a copy lies in a file."""


def copy_aside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host; it ends with the tensor returned, and leaves nothing on the disk.

    Args:
        tensor: On any device, of any kind. The copy lies in a file where it is large, there is room on the
            disk, and the system can promise it.
    """
    ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if ordinary and not tensor.is_quantized and tensor.nbytes >= LARGE_BYTES:
        with contextlib.suppress(OSError, AttributeError):  # no room; systems without such promises
            return _in_file(tensor.detach())
    return tensor.detach().to("cpu", copy=True)


def _in_file(tensor: torch.Tensor) -> torch.Tensor:
    with tempfile.TemporaryFile() as file:  # has no name, so that whatever happens nothing is left
        os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # else a full disk would end the process
        pages = mmap.mmap(file.fileno(), tensor.nbytes)
    copy = torch.frombuffer(pages, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    pages.madvise(mmap.MADV_DONTNEED)  # they stay with the file, and no longer count as this process's
    return copy
