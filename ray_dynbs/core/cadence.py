"""How often a decision is made."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ray_dynbs.core.errors import ConfigError


@dataclass(frozen=True)
class Cadence:
    """At every pass's end, and within a pass after so many steps or rows.

    Attributes:
        steps: Optimizer steps from one decision to the next; ``None``: only at a pass's end.
        samples: The same in rows.

    Raises:
        ConfigError: both are given, or one is below 1.
    """

    steps: int | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        given = [number for number in (self.steps, self.samples) if number is not None]
        if len(given) > 1 or any(number < 1 for number in given):
            raise ConfigError(f"{self}: allowed: one of steps and samples, at least 1")

    def steps_until_due(self, batch_size: int) -> int:
        """Steps of a batch size from one decision to the next; more than any pass has where there is none."""
        if self.samples is not None:
            return -(-self.samples // batch_size)
        return sys.maxsize if self.steps is None else self.steps

    def due(self, steps: int, samples: int) -> bool:
        """Whether a decision is due, so many steps and rows after the last one."""
        return (self.steps is not None and steps >= self.steps) or (
            self.samples is not None and samples >= self.samples
        )
