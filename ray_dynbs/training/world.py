"""The data-parallel ranks of this process group, and the few collectives that training needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ray_dynbs.training.allocator import prefer_expandable_segments


@dataclass(frozen=True)
class World:
    """This process among the data-parallel ranks.

    Attributes:
        rank: This process, in ``[0, size)``.
        size: Number of ranks; 1 without a process group.
        device: Where this rank computes.
    """

    rank: int
    size: int
    device: torch.device

    @classmethod
    def current(cls, device: torch.device | str = "cpu") -> World:
        """The world torch.distributed was initialised with, or a world of one.

        Nothing is on the device yet, so its allocator is set up here.
        """
        prefer_expandable_segments(torch.device(device))
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), torch.device(device))
        return cls(0, 1, torch.device(device))

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def broadcast_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite a tensor with rank 0's, in place; as bytes, since not every type can be sent."""
        if self.size > 1 and tensor.numel():
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            dist.broadcast(data, src=0)
            tensor.detach().copy_(data.view(tensor.dtype).view_as(tensor))
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]
