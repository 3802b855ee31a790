"""``schedule``: the batch by a table over samples or passes (Smith et al. 2018; Megatron's ramp-up)."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.keys import Key
from ray_dynbs.core.policy import Proposal, State, Stateless, View


@dataclass(frozen=True, kw_only=True)
class Schedule(Stateless):
    """Stages of a table, each ``[from, size]``; or straight lines between them.

    Raises:
        ConfigError: an empty table, one out of order, sizes that are no whole numbers of at least 1.
    """

    stages: Annotated[list[list[float]], Key("[[from, size], ...], in order")]
    unit: Annotated[Literal["samples", "epochs"], Key("what `from` counts")] = "samples"
    ramp: Annotated[bool, Key("go in a straight line from each stage's size to the next one's")] = False

    def __post_init__(self) -> None:
        if not self.stages or any(len(stage) != 2 for stage in self.stages):
            raise ConfigError(f"schedule: stages is {self.stages}; allowed: [[from, size], ...]")
        starts = [stage[0] for stage in self.stages]
        if not all(math.isfinite(x) for stage in self.stages for x in stage) or min(starts) < 0:
            raise ConfigError(f"schedule: stages is {self.stages}; allowed: finite numbers, from at least 0")
        for before, after in itertools.pairwise(starts):
            if not before < after:
                raise ConfigError(
                    f"schedule: a stage from {after:g} follows one from {before:g}; allowed: in order"
                )
        for _, size in self.stages:
            if size < 1 or size != int(size):
                raise ConfigError(f"schedule: a size is {size:g}; allowed: whole numbers of at least 1")

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """The table's size for the place the run has come to; before the first stage the batch is kept."""
        signal = view.signal
        place = signal.samples_seen if self.unit == "samples" else signal.epochs_seen
        size = self.size_at(place)
        if size is None:
            first = self.stages[0][0]
            return proposal.because(f"schedule: begins at {first:g} {self.unit}: hold"), state
        return proposal.because(f"schedule: {size} at {place:g} {self.unit}", global_batch_size=size), state

    def size_at(self, place: float) -> int | None:
        """Rows at a place of the run; ``None`` before the first stage."""
        index = bisect.bisect_right([stage[0] for stage in self.stages], place) - 1
        if index < 0:
            return None
        start, size = self.stages[index]
        if self.ramp and index + 1 < len(self.stages):
            stop, next_size = self.stages[index + 1]
            size += (next_size - size) * (place - start) / (stop - start)
        return int(size)
