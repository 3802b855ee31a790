"""``plateau``: grow the batch where one would otherwise cut the LR (Smith et al. 2018, arXiv 1711.00489)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.policy import Proposal, State, View
from ray_dynbs.core.signal import Signal


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Grow by ``factor`` once the loss has not got better for ``patience`` decisions.

    The validation loss counts where there is one, else the training loss. The noise scale of SGD is
    ``g = LR (N/B - 1) / (1 - m)`` (section 2 there): a larger B lowers it as a smaller LR does. Keep B
    below about a tenth of the rows.

    Raises:
        ConfigError: a key out of range.
    """

    patience: Annotated[int, Key("decisions without improvement before the batch grows", ge=1)] = 2
    min_improvement: Annotated[float, Key("relative improvement that counts as one", ge=0, lt=1)] = 0.01
    factor: Annotated[float, Key("factor of growth", gt=1, le=1_000)] = 2.0

    def __post_init__(self) -> None:
        check_ranges(self)

    def init(self, plan: object) -> State:
        """No loss seen."""
        return {"best": None, "waited": 0}

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """Compare with the best loss so far; after a growth the waiting begins anew."""
        loss, name = _loss(view.signal)
        if loss is None:
            return proposal.because("plateau: no loss measured: hold"), state
        best = state["best"]
        if best is None or loss < best - self.min_improvement * abs(best):
            return proposal.because(f"plateau: {name} {loss:.4g} is the best so far: hold"), _at(loss)
        waited = state["waited"] + 1
        said = f"plateau: {name} {loss:.4g}, not better than {best:.4g}"
        if waited < self.patience:
            return proposal.because(f"{said} for {waited} of {self.patience}: hold"), _at(best, waited)
        grown = max(int(view.plan.global_batch_size * self.factor), view.plan.global_batch_size + 1)
        return proposal.because(f"{said} for {waited}: grow", global_batch_size=grown), _at(best)


def _at(best: float, waited: int = 0) -> State:
    return {"best": best, "waited": waited}


def _loss(signal: Signal) -> tuple[float | None, str]:
    if signal.val_loss is not None:
        return signal.val_loss, "val_loss"
    if dict(signal.missing).get("val_loss"):
        return None, "val_loss"
    return signal.train_loss, "train_loss"
