"""What one step says of its gradient's noise: from its ranks, its micro-batches, or the step before.

Nothing here waits for the device. Squared norms may be taken in Adam's own metric, every gradient over
``sqrt(v) + eps`` (the preconditioned noise scale of Pollux, OSDI 2021, section 4.1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.training.gradients import FlatGradients
from ray_dynbs.training.stopwatch import Stopwatch
from ray_dynbs.training.world import World

Measure = Literal["pieces", "successive", "keep"]
"""In this step: its pieces; its gradient against the one kept; or keep its gradient for the next step."""
AddPiece = Callable[[Any], None]


@dataclass(frozen=True)
class Pieces:
    """Pieces of a batch: ranks, the micro-batches of a single rank, or two steps. Tensors stay on the device.

    Attributes:
        mean_sq_norm: ``n``, squared norm of the weighted mean gradient, scalar.
        sq_norm: ``Q``, weighted mean of the pieces' squared norms of their mean gradients, scalar.
        number: ``J``, pieces with weight, scalar.
        rows: ``B``, rows of all pieces.
        biased: The pieces are two steps, between which the weights have moved.
        preconditioned: The norms are those of Adam's metric.
    """

    mean_sq_norm: torch.Tensor
    sq_norm: torch.Tensor
    number: torch.Tensor
    rows: int
    biased: bool = False
    preconditioned: bool = False


class StepNoise:
    """One step's measurement, and what to do for it at each place of the step; here: nothing."""

    @contextlib.contextmanager
    def around_backward(self) -> Iterator[AddPiece]:
        """Around each backward; what it yields is to be called with the micro-batch's weight."""
        yield lambda _: None

    def before_reduction(self) -> None:
        """All micro-batches are accumulated."""

    def after_reduction(self, rows: int, weight: torch.Tensor, scale: float) -> None:
        """The gradients are sums over all ranks, of losses over ``rows`` times fp16's ``scale``."""

    def of_mean(self, norm: torch.Tensor) -> Pieces | None:
        """The gradients are means, not clipped yet; ``norm`` is theirs."""
        return None


class NoiseMeter:
    """Measures what is asked for, with what there is.

    Args:
        gradients: Of the step.
        optimizers: Whose second moments make the metric.
        world: The ranks.
        preconditioned: In Adam's metric.

    Raises:
        ConfigError: an optimizer without second moments cannot give that metric.
    """

    def __init__(
        self,
        gradients: FlatGradients,
        optimizers: Sequence[torch.optim.Optimizer],
        world: World,
        *,
        preconditioned: bool = False,
    ) -> None:
        self.gradients, self.world = gradients, world
        self.preconditioned = preconditioned
        self._optimizers = optimizers
        self.kept: tuple[torch.Tensor, int] | None = None
        without = [o for o in optimizers if any("betas" not in group for group in o.param_groups)]
        if preconditioned and without:
            raise ConfigError(
                f"noise.preconditioned is true, and {type(without[0]).__name__} keeps no second moments; "
                "allowed with adam and adamw"
            )

    def of_step(self, measure: Measure | None, stopwatch: Stopwatch | None = None) -> StepNoise:
        """What to do in the step that begins; nothing where the metric is not known yet."""
        if measure is None:
            return StepNoise()
        if self.preconditioned and not self._weigh():
            return StepNoise()
        watch = stopwatch or Stopwatch(self.world.device)
        if measure != "pieces":
            return _Succession(self, watch, compare=measure == "successive")
        return _Ranks(self, watch) if self.world.size > 1 else _MicroBatches(self, watch)

    def forget(self) -> None:
        """Keep no gradient and no metric: what follows must not depend on what came before."""
        self.kept = None
        self.gradients.weigh(None)

    def _weigh(self) -> bool:
        """Take the optimizers' present second moments for the metric; whether they have any."""
        scales = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    scales[id(p)] = _adams_scale(optimizer.state.get(p), group)
        flat = [scales.get(id(p)) for p in self.gradients.parameters]
        known = [each.reshape(-1) for each in flat if each is not None]
        if len(known) < len(flat):
            return False
        self.gradients.weigh(1.0 / torch.cat(known).to(self.gradients.flat.dtype))
        return True


def _adams_scale(state: Any, group: dict[str, Any]) -> torch.Tensor | None:
    """``sqrt(v_hat) + eps`` of one parameter, or ``None`` before its first step."""
    if not state or "exp_avg_sq" not in state:
        return None
    second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    step = torch.as_tensor(state["step"], dtype=torch.float64)
    bias = 1.0 - torch.as_tensor(group["betas"][1], dtype=torch.float64) ** step
    scale: torch.Tensor = second.detach().sqrt() / bias.sqrt().to(second.device, second.dtype) + group["eps"]
    return scale


class _OfPieces(StepNoise):
    """The pieces' squared norms went through the step's own reduction."""

    def __init__(self, meter: NoiseMeter, watch: Stopwatch) -> None:
        self._meter, self._gradients, self._watch = meter, meter.gradients, watch
        self._sums: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows = 0

    def after_reduction(self, rows: int, weight: torch.Tensor, scale: float) -> None:
        """From sums of losses over ``rows``, scaled for fp16, to means over each piece's weight."""
        squares, number = self._gradients.piece_sums()
        self._rows, self._sums = rows, (squares * (rows / scale) ** 2 / weight, number)

    def of_mean(self, norm: torch.Tensor) -> Pieces | None:
        if self._sums is None:
            return None
        weighed = self._meter.preconditioned
        with self._watch.timing(only=weighed):
            mean = self._gradients.sq_norm() if weighed else norm**2
        return Pieces(mean, *self._sums, rows=self._rows, preconditioned=weighed)


class _Ranks(_OfPieces):
    """What each rank has accumulated is a piece."""

    def before_reduction(self) -> None:
        with self._watch.timing():
            self._gradients.add_rank_piece()


class _MicroBatches(_OfPieces):
    """Each micro-batch of the only rank is a piece."""

    @contextlib.contextmanager
    def around_backward(self) -> Iterator[AddPiece]:
        with self._gradients.micro_piece() as add:
            yield add


class _Succession(StepNoise):
    """This step and the one before are two pieces: the only ones where a step is a lone micro-batch.

    ``|G|^2`` is then their product and ``tr(Sigma)`` half their squared difference times the rows of one, as
    the formula for pieces gives it for two of one size. Biased by the movement of the weights.
    """

    def __init__(self, meter: NoiseMeter, watch: Stopwatch, *, compare: bool) -> None:
        self._meter, self._watch, self._compare = meter, watch, compare
        self._rows = 0

    def after_reduction(self, rows: int, weight: torch.Tensor, scale: float) -> None:
        self._rows = rows

    def of_mean(self, norm: torch.Tensor) -> Pieces | None:
        meter, rows = self._meter, self._rows
        with self._watch.timing():
            kept, now = meter.kept, meter.gradients.flat
            if kept is None or kept[0].numel() != now.numel():  # layers were frozen or thawed meanwhile
                meter.kept = now.clone(), rows
                return None
            pieces = self._two(*kept) if self._compare else None
            meter.kept = kept[0].copy_(now), rows
        return pieces

    def _two(self, before: torch.Tensor, rows_before: int) -> Pieces:
        gradients, rows = self._meter.gradients, self._rows
        both = rows_before + rows
        mean = torch.lerp(before, gradients.flat, rows / both)
        squares = gradients.sq_norm(before) * (rows_before / both) + gradients.sq_norm() * (rows / both)
        return Pieces(
            gradients.sq_norm(mean),
            squares,
            torch.full_like(squares, 2.0),
            rows=both,
            biased=True,
            preconditioned=self._meter.preconditioned,
        )
