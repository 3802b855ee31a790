"""Measurements since the last decision, accumulated on the device without host synchronisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ray_dynbs.core.estimators import PieceSums
from ray_dynbs.training.noise import Pieces


@dataclass(frozen=True)
class Totals:
    """What :class:`StepStats` holds, on the host.

    Attributes:
        num_steps: Steps added.
        num_finite_steps: Those with a finite gradient norm and loss, and some weight.
        norm_sum: Sum of gradient norms over the finite steps.
        loss_sum: Sum of losses over the finite steps.
        weight_sum: Sum of weights (rows or tokens) over the finite steps.
        first_bad_step: Run-wide number of the first step that was not finite, or ``None``.
        pieces: Sums of gradient noise over the measured steps, ``None`` where there was none.
    """

    num_steps: int
    num_finite_steps: int
    norm_sum: float
    loss_sum: float
    weight_sum: float
    first_bad_step: int | None
    pieces: PieceSums | None = None

    def __add__(self, other: Totals) -> Totals:
        """Of both, the other one's steps later."""
        first = other.first_bad_step if self.first_bad_step is None else self.first_bad_step
        pieces = self.pieces + other.pieces if self.pieces and other.pieces else self.pieces or other.pieces
        return Totals(
            num_steps=self.num_steps + other.num_steps,
            num_finite_steps=self.num_finite_steps + other.num_finite_steps,
            norm_sum=self.norm_sum + other.norm_sum,
            loss_sum=self.loss_sum + other.loss_sum,
            weight_sum=self.weight_sum + other.weight_sum,
            first_bad_step=first,
            pieces=pieces,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Totals:
        """The inverse of :meth:`to_json`."""
        pieces = data["pieces"]
        return cls(**{**data, "pieces": None if pieces is None else PieceSums.from_json(pieces)})

    @property
    def grad_norm(self) -> float:
        """Mean gradient norm of the finite steps; NaN where there is none."""
        return self.norm_sum / self.num_finite_steps if self.num_finite_steps else float("nan")

    @property
    def loss(self) -> float:
        """Summed loss over summed weight of the finite steps; NaN where there is no weight."""
        return self.loss_sum / self.weight_sum if self.weight_sum else float("nan")


NOTHING = Totals(0, 0, 0.0, 0.0, 0.0, None)
"""No step."""


class StepStats:
    """Running sums over steps.

    The inputs are already those of the whole step over all ranks, so every rank holds the same sums and
    no further reduction is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._pieces = torch.zeros(6, dtype=torch.float64, device=device)
        self._first_bad = torch.full((), torch.inf, dtype=torch.float64, device=device)
        self._num_steps = 0
        self._kind, self._measured = (False, False), False

    def add(self, step: int, norm: torch.Tensor, loss_sum: torch.Tensor, weight: torch.Tensor) -> None:
        """Add one step; one that is not finite only counts as such, one without any weight not at all.

        Args:
            step: Run-wide number of the step, from 1.
            norm: L2 norm of the step's mean gradient, scalar.
            loss_sum: Sum of losses over the step, scalar.
            weight: Sum of weights over the step, scalar.
        """
        numbers = torch.stack([torch.ones_like(norm), norm, loss_sum, weight]).double()
        finite = torch.isfinite(numbers).all()
        self._sums += torch.where(finite & (weight != 0), numbers, 0.0)
        bad_step = torch.where(finite, torch.inf, float(step))
        self._first_bad = torch.minimum(self._first_bad, bad_step.double())
        self._num_steps += 1

    def add_pieces(self, pieces: Pieces) -> None:
        """Add what one step's pieces say of the gradient's noise; nothing unless there are two, and finite.

        Unbiased as :func:`~ray_dynbs.core.estimators.from_pieces` has it, without leaving the device. Of
        real pieces and successive steps only the former count.
        """
        kind = pieces.biased, pieces.preconditioned
        if kind != self._kind:
            if pieces.biased and self._measured:
                return
            self._pieces.zero_()
        self._kind, self._measured = kind, True
        n, q, others = pieces.mean_sq_norm.double(), pieces.sq_norm.double(), pieces.number.double() - 1
        grad_sq, variance = ((others + 1) * n - q) / others, pieces.rows * (q - n) / others
        one = torch.ones_like(n)
        moments = [one, grad_sq, variance, grad_sq**2, variance**2, grad_sq * variance]
        numbers = torch.stack(moments)
        sound = torch.isfinite(numbers).all() & (others >= 1)
        self._pieces += torch.where(sound, numbers, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, JSON-able, for a checkpoint in mid-pass. Synchronises with the device."""
        return {
            "sums": self._sums.tolist(),
            "pieces": self._pieces.tolist(),
            "kind": [*self._kind, self._measured],
            "first_bad_step": self.first_bad_step(),
            "num_steps": self._num_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the sums of :meth:`state_dict`."""
        self._sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
        self._pieces.copy_(torch.tensor(state["pieces"], dtype=torch.float64))
        biased, preconditioned, self._measured = state["kind"]
        self._kind = biased, preconditioned
        bad = state["first_bad_step"]
        self._first_bad.fill_(torch.inf if bad is None else bad)
        self._num_steps = state["num_steps"]

    def first_bad_step(self) -> int | None:
        """Run-wide number of the first step that was not finite. Synchronises with the device."""
        bad = self._first_bad.item()
        return None if bad == float("inf") else int(bad)

    def take(self) -> Totals:
        """The totals since the last take, and start anew. Synchronises with the device once."""
        finite_steps, norm_sum, loss_sum, weight_sum, bad, measured, *moments = torch.cat(
            [self._sums, self._first_bad[None], self._pieces]
        ).tolist()
        totals = Totals(
            num_steps=self._num_steps,
            num_finite_steps=int(finite_steps),
            norm_sum=norm_sum,
            loss_sum=loss_sum,
            weight_sum=weight_sum,
            first_bad_step=None if bad == float("inf") else int(bad),
            pieces=self._sums_of_pieces(int(measured), moments),
        )
        self._sums.zero_()
        self._pieces.zero_()
        self._first_bad.fill_(torch.inf)
        self._num_steps, self._measured = 0, False
        return totals

    def _sums_of_pieces(self, steps: int, moments: list[float]) -> PieceSums | None:
        grad_sq, variance, grad_sq_2, variance_2, cross = moments
        biased, preconditioned = self._kind
        if not steps:
            return None
        return PieceSums(
            steps,
            grad_sq,
            variance,
            grad_sq_2,
            variance_2,
            cross,
            biased=biased,
            preconditioned=preconditioned,
        )
