"""All gradients of a model in one flat buffer, so that a step needs one reduction.

``p.grad`` of every trainable parameter is a view into the buffer: backward accumulates straight
into it, nothing is copied, and reduction, norm and clipping are each one operation. A few extra
elements at the end carry the step's loss sum and weight, and the squared norms of its pieces,
through the same all-reduce.

The reduction is explicit instead of DistributedDataParallel's hooks: ranks may hold different
numbers of micro-batches, or none, and no collective is open while a forward or backward runs. It
costs the overlap of communication and computation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.training.world import World

TAIL = 4
"""Elements behind the gradients: loss sum, weight, sum of |piece|^2 / weight, number of pieces."""


class FlatGradients:
    """The gradients of one step, of all parameters that are trained.

    Args:
        parameters: The model's parameters.
        optimizers: Those that train them: what no optimizer holds, or what is frozen, is left out. Both are
            looked at in every step, so that layers may be frozen and thawed on the way.

    Raises:
        ConfigError: no parameter is trained, or they have several devices or dtypes, or less than 32 bits.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._all, self._optimizers = list(parameters), optimizers
        self._weights: torch.Tensor | None = None
        self._lay_out()

    def _lay_out(self) -> None:
        held = {id(p) for optimizer in self._optimizers for p in _parameters(optimizer)}
        self._layout = self._present_layout()
        self.parameters = [p for p in self._all if p.requires_grad and id(p) in held]
        self._others = [p for p in self._all if not (p.requires_grad and id(p) in held)]
        first = self._check_kinds()
        num_params = sum(p.numel() for p in self.parameters)
        self._buffer = torch.zeros(num_params + TAIL, dtype=first.dtype, device=first.device)
        self.flat = self._buffer[:num_params]
        self._tail = self._buffer[num_params:]
        self._views = self._per_parameter(self.flat)
        self._weights = None

    @property
    def largest_bytes(self) -> int:
        """Of the gradient of the largest parameter."""
        return max(view.nbytes for view in self._views)

    def _per_parameter(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views into a buffer laid out like the gradients."""
        pieces = flat.split([p.numel() for p in self.parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]

    def _check_kinds(self) -> torch.nn.Parameter:
        """See that one buffer can hold them all; returns one of them.

        Raises:
            ConfigError: it cannot.
        """
        kinds = sorted({f"{p.dtype} on {p.device}" for p in self.parameters})
        if len(kinds) != 1:
            raise ConfigError(f"trainable parameters are {kinds or 'none'}; allowed: one dtype on one device")
        first = self.parameters[0]
        if first.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"trainable parameters are {first.dtype}; allowed: float32 or float64 (for half "
                "precision keep float32 weights and set precision: bf16 or fp16)"
            )
        return first

    def _present_layout(self) -> tuple[list[bool], int]:
        sizes = [len(group["params"]) for o in self._optimizers for group in o.param_groups]
        return [p.requires_grad for p in self._all], sum(sizes)

    def zero(self) -> None:
        """Start a step: everything zero, ``p.grad`` attached to the buffer again if it was replaced."""
        if self._present_layout() != self._layout:
            self._lay_out()
        self._buffer.zero_()
        for p, view in zip(self.parameters, self._views, strict=True):
            if p.grad is not view:
                p.grad = view
        for p in self._others:
            p.grad = None

    def add_loss(self, loss_sum: torch.Tensor, weight: torch.Tensor | float) -> None:
        """Add one micro-batch's loss sum and weight; no host synchronisation."""
        self._tail[0] += loss_sum.detach()
        self._tail[1] += weight

    def weigh(self, weights: torch.Tensor | None) -> None:
        """Take squared norms of gradients times these weights from now on; ``None``: as they are."""
        self._weights = weights

    def sq_norm(self, gradients: torch.Tensor | None = None) -> torch.Tensor:
        """Squared norm in that metric of what is accumulated, or of gradients laid out like it; scalar."""
        flat = self.flat if gradients is None else gradients
        weighed = flat if self._weights is None else flat * self._weights
        return torch.dot(weighed, weighed)

    def add_rank_piece(self) -> None:
        """Count what this rank has accumulated as one piece; before :meth:`reduce`."""
        self._add_piece(self.sq_norm(), self._tail[1])

    @contextlib.contextmanager
    def micro_piece(self) -> Iterator[Callable[[torch.Tensor | float], None]]:
        """Count one backward as a piece of its own, though it accumulates onto others.

        Yields:
            To be called with the micro-batch's weight, after its backward.
        """
        square = torch.zeros((), dtype=self.flat.dtype, device=self.flat.device)

        def adding(weights: torch.Tensor | None) -> Callable[[torch.Tensor], None]:
            def add(gradient: torch.Tensor) -> None:
                gradient = gradient.detach()
                if gradient.is_sparse:  # rows that came up twice are summed up first
                    gradient = gradient.coalesce().values() if weights is None else gradient.to_dense()
                weighed = gradient if weights is None else gradient * weights
                square.add_(torch.linalg.vector_norm(weighed) ** 2)

            return add

        no_weights: list[torch.Tensor | None] = [None] * len(self.parameters)
        weights = no_weights if self._weights is None else self._per_parameter(self._weights)
        hooks = [p.register_hook(adding(each)) for p, each in zip(self.parameters, weights, strict=True)]
        try:
            yield lambda weight: self._add_piece(square, torch.as_tensor(weight, device=square.device))
        finally:
            for hook in hooks:
                hook.remove()

    def _add_piece(self, square: torch.Tensor, weight: torch.Tensor) -> None:
        there = weight > 0
        self._tail[2] += torch.where(there, square / weight.to(square.dtype), 0.0)
        self._tail[3] += there

    def piece_sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the pieces' squared norms, each over its weight, and their number; after :meth:`reduce`."""
        return self._tail[2].clone(), self._tail[3].clone()

    def reduce(self, world: World) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over ranks: gradients, loss and weight in one all-reduce.

        Returns:
            Loss sum and weight of the whole step, each a scalar tensor on the device.
        """
        world.sum_(self._buffer)
        return self._tail[0].clone(), self._tail[1].clone()

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply every gradient by a scalar tensor."""
        self.flat.mul_(factor)

    def norm(self) -> torch.Tensor:
        """L2 norm of the gradients, a scalar tensor."""
        norm: torch.Tensor = torch.linalg.vector_norm(self.flat)
        return norm

    def clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Scale down to ``max_norm`` where ``norm`` exceeds it, as ``clip_grad_norm_`` does."""
        self.flat.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
