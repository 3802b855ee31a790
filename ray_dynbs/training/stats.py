"""Measurements since the last decision, accumulated on the device without host synchronisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Totals:
    """What :class:`StepStats` holds, on the host.

    Attributes:
        num_steps: Steps added.
        num_finite_steps: Those with a finite gradient norm and loss.
        norm_sum: Sum of gradient norms over the finite steps.
        loss_sum: Sum of losses over the finite steps.
        weight_sum: Sum of weights (rows or tokens) over the finite steps.
        first_bad_step: Run-wide number of the first step that was not finite, or ``None``.
    """

    num_steps: int
    num_finite_steps: int
    norm_sum: float
    loss_sum: float
    weight_sum: float
    first_bad_step: int | None

    @property
    def grad_norm(self) -> float:
        """Mean gradient norm of the finite steps; NaN where there is none."""
        return self.norm_sum / self.num_finite_steps if self.num_finite_steps else float("nan")

    @property
    def loss(self) -> float:
        """Summed loss over summed weight of the finite steps; NaN where there is no weight."""
        return self.loss_sum / self.weight_sum if self.weight_sum else float("nan")


class StepStats:
    """Running sums over steps.

    The inputs are already those of the whole step over all ranks, so every rank holds the same sums and
    no further reduction is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._first_bad = torch.full((), torch.inf, dtype=torch.float64, device=device)
        self._num_steps = 0

    def add(self, step: int, norm: torch.Tensor, loss_sum: torch.Tensor, weight: torch.Tensor) -> None:
        """Add one step; a step that is not finite only counts as such.

        Args:
            step: Run-wide number of the step, from 1.
            norm: L2 norm of the step's mean gradient, scalar.
            loss_sum: Sum of losses over the step, scalar.
            weight: Sum of weights over the step, scalar.
        """
        numbers = torch.stack([torch.ones_like(norm), norm, loss_sum, weight]).double()
        finite = torch.isfinite(numbers).all()
        self._sums += torch.where(finite, numbers, 0.0)
        bad_step = torch.where(finite, torch.inf, float(step))
        self._first_bad = torch.minimum(self._first_bad, bad_step.double())
        self._num_steps += 1

    def state_dict(self) -> list[float]:
        """The sums so far, for a checkpoint in mid-pass. Synchronises with the device."""
        return [*torch.cat([self._sums, self._first_bad[None]]).tolist(), float(self._num_steps)]

    def load_state_dict(self, state: list[float]) -> None:
        """Go on with the sums of :meth:`state_dict`."""
        self._sums.copy_(torch.tensor(state[:4], dtype=torch.float64))
        self._first_bad.fill_(state[4])
        self._num_steps = int(state[5])

    def first_bad_step(self) -> int | None:
        """Run-wide number of the first step that was not finite. Synchronises with the device."""
        bad = self._first_bad.item()
        return None if bad == float("inf") else int(bad)

    def take(self) -> Totals:
        """The totals since the last take, and start anew. Synchronises with the device once."""
        finite_steps, norm_sum, loss_sum, weight_sum, bad = torch.cat(
            [self._sums, self._first_bad[None]]
        ).tolist()
        totals = Totals(
            num_steps=self._num_steps,
            num_finite_steps=int(finite_steps),
            norm_sum=norm_sum,
            loss_sum=loss_sum,
            weight_sum=weight_sum,
            first_bad_step=None if bad == float("inf") else int(bad),
        )
        self._sums.zero_()
        self._first_bad.fill_(torch.inf)
        self._num_steps = 0
        return totals
