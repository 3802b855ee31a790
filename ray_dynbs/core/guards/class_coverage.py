"""``class_coverage``: no batch so small that it misses classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from ray_dynbs.core.coverage import smallest_covering_batch
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.policy import Proposal, State, Stateless, View

AUTO: Literal["auto"] = "auto"
"""Counts that are taken from the training rows before the run starts."""


@dataclass(frozen=True, kw_only=True)
class ClassCoverage(Stateless):
    """Raise the proposal to the smallest batch that shows every class with probability ``quantile``.

    Raises:
        ConfigError: counts not above 0, a quantile out of range, or classes too rare to cover.
    """

    class_counts: Annotated[
        list[float] | Literal["auto"], Key("rows, or weights, of each class; auto: as in the training rows")
    ] = AUTO
    label: Annotated[str | None, Key("column of the classes, for auto; data.label, else label")] = None
    quantile: Annotated[float, Key("probability that a batch shows every class", gt=0, lt=1)] = 0.95
    exact: Annotated[bool, Key("exactly, instead of by the union bound")] = True

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.class_counts != AUTO:
            _ = self.floor

    @cached_property
    def floor(self) -> int:
        """The smallest batch, rows.

        Raises:
            ConfigError: the counts are not known yet.
        """
        if self.class_counts == AUTO:
            raise ConfigError(
                "class_coverage: class_counts is auto, which needs the training rows; allowed here: numbers"
            )
        return smallest_covering_batch(self.class_counts, self.quantile, exact=self.exact)

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """At least the floor."""
        wanted = proposal.global_batch_size
        if wanted >= self.floor:
            return proposal, state
        classes = len(self.class_counts)
        reason = f"class_coverage: {wanted} -> {self.floor} (all {classes} classes at {self.quantile:g})"
        return proposal.because(reason, global_batch_size=self.floor), state
