"""Everything that is estimated from a run's signals, behind one state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_dynbs.core.estimators.estimate import Estimates
from ray_dynbs.core.estimators.noise_scale import NoiseScale
from ray_dynbs.core.estimators.trend import add_point, no_line, slope
from ray_dynbs.core.signal import Signal

State = dict[str, Any]


@dataclass(frozen=True)
class Knowledge:
    """The estimators of a run.

    Attributes:
        noise: How gradient noise is smoothed.
    """

    noise: NoiseScale = field(default_factory=NoiseScale)

    def init(self) -> State:
        """Nothing seen."""
        return {
            "noise": self.noise.init(),
            "loss": {"line": no_line(), "of": None},
            "memory": {"line": no_line(), "of": None},
        }

    def update(self, state: Mapping[str, Any], signal: Signal, micro_batch_size: int) -> State:
        """Learn from one signal.

        Args:
            state: From :meth:`init` or the last update.
            signal: What was measured; what is missing in it changes nothing.
            micro_batch_size: Under which it was measured: memory of another one is another line.
        """
        loss, name = (signal.val_loss, "val_loss") if signal.val_loss is not None else (None, "train_loss")
        if loss is None and state["loss"]["of"] != "val_loss":
            loss = signal.train_loss
        return {
            "noise": self.noise.update(state["noise"], signal.pieces),
            "loss": _followed(state["loss"], signal.epochs_seen, loss, name),
            "memory": _followed(
                state["memory"], signal.epochs_seen, signal.memory_fraction, micro_batch_size
            ),
        }

    def restored(self, saved: Mapping[str, Any]) -> State:
        """A saved state, but for noise that was averaged in another way."""
        return {**saved, "noise": self.noise.restored(saved["noise"])}

    def forgets(self, saved: Mapping[str, Any]) -> bool:
        """Whether :meth:`restored` cannot go on with what is saved of the noise."""
        return bool(self.noise.restored(saved["noise"]) != saved["noise"])

    def estimates(self, state: Mapping[str, Any]) -> Estimates:
        """What is known."""
        return Estimates(
            **self.noise.estimates(state["noise"]),
            loss_trend=slope(state["loss"]["line"]),
            memory_trend=slope(state["memory"]["line"]),
        )


def _followed(followed: Mapping[str, Any], x: float, y: float | None, of: str | int) -> dict[str, Any]:
    """One more point of something, which begins anew where it is of something else."""
    if y is None:
        return dict(followed)
    line = followed["line"] if followed["of"] == of else no_line()
    return {"line": add_point(line, x, y), "of": of}
