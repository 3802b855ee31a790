"""``plateau``: grow the batch where one would otherwise cut the LR (Smith et al. 2018, arXiv 1711.00489)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.policy import Proposal, State, View
from ray_dynbs.core.signal import Signal

SIGNIFICANT = 2.0
"""Standard errors that make a trend certain."""


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Grow by ``factor`` once the loss has not got better for ``patience`` decisions.

    The validation loss counts where there is one, else the training loss. With ``trend`` it is the line
    through the last ten or so decisions that counts: grow once the loss is known to fall by less than
    ``min_improvement`` per pass, which a single lucky value cannot put off. The noise scale of SGD is
    ``g = LR (N/B - 1) / (1 - m)`` (section 2 there): a larger B lowers it as a smaller LR does. Keep B
    below about a tenth of the rows.

    Raises:
        ConfigError: a key out of range.
    """

    patience: Annotated[int, Key("decisions without improvement before the batch grows", ge=1)] = 2
    min_improvement: Annotated[float, Key("relative improvement that counts as one", ge=0, lt=1)] = 0.01
    factor: Annotated[float, Key("factor of growth", gt=1, le=1_000)] = 2.0
    trend: Annotated[bool, Key("go by the loss's trend per pass instead of by its best value")] = False

    def __post_init__(self) -> None:
        check_ranges(self)

    def init(self, plan: object) -> State:
        """No loss seen."""
        return {"best": None, "of": None, "waited": 0}

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """Compare with the best loss so far; once the batch has changed, the waiting begins anew."""
        loss, name = _loss(view.signal, state["of"])
        if loss is None:
            return proposal.because(f"plateau: {name} {view.signal.why_missing(name)}: hold"), state
        if state["of"] != name:  # training and validation losses are not compared with each other
            state = {**self.init(view.plan), "of": name}
        if view.decisions_since_change == 0:
            state = {**state, "waited": 0}
        if self.trend:
            return self._by_trend(proposal, state, view, loss)
        best = state["best"]
        if best is None or loss < best - self.min_improvement * abs(best):
            said = f"plateau: {name} {loss:.4g} is the best so far: hold"
            return proposal.because(said), {**state, "best": loss, "waited": 0}
        state, size = {**state, "waited": state["waited"] + 1}, view.plan.global_batch_size
        said = f"plateau: {name} {loss:.4g}, not {self.min_improvement:.3g} of {best:.4g} below it"
        if state["waited"] < self.patience:
            return proposal.because(f"{said} for {state['waited']} of {self.patience}: hold"), state
        if view.bounds is not None and size >= view.bounds[1]:
            return proposal.because(f"{said}: as large as allowed, only a smaller LR is left"), state
        grown = self._grown(size)
        return proposal.because(f"{said} for {state['waited']}: grow", global_batch_size=grown), state

    def _grown(self, size: int) -> int:
        return max(int(size * self.factor), size + 1)

    def _by_trend(self, proposal: Proposal, state: State, view: View, loss: float) -> tuple[Proposal, State]:
        """Grow where the fall is known to be too slow, and has been looked at for ``patience`` decisions."""
        trend, name, state = view.estimates.loss_trend, state["of"], {**state, "waited": state["waited"] + 1}
        if trend is None or not math.isfinite(trend.relative_error):
            return proposal.because(f"plateau: no trend of {name} yet: hold"), state
        error = abs(trend.value) * trend.relative_error
        said = f"plateau: {name} changes by {trend.value:.3g} +- {error:.2g} a pass"
        too_slow = trend.value - SIGNIFICANT * error > -self.min_improvement * abs(loss)
        if not too_slow or state["waited"] < self.patience:
            return proposal.because(f"{said}: hold"), state
        grown = self._grown(view.plan.global_batch_size)
        return proposal.because(f"{said}: grow", global_batch_size=grown), state


def _loss(signal: Signal, followed: str | None) -> tuple[float | None, str]:
    """The validation loss, and once there was one nothing else; until then the training loss."""
    missing = "val_loss" in dict(signal.missing)
    if signal.val_loss is not None or missing or followed == "val_loss":
        return signal.val_loss, "val_loss"
    return signal.train_loss, "train_loss"
