"""``threshold``: two limits on the gradient norm, two on memory, one move of a factor two.

The well-known sketch (halve above a norm of 10, double below 0.1, likewise for memory), repaired:
votes are combined before anything moves, so that two rules cannot cancel each other; a shrink vote
wins; memory by default changes the micro-batch and never the global batch.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Annotated, Literal

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.core.policy import Proposal, State, View
from ray_dynbs.core.signal import Signal

MemoryVote = Literal["accumulate", "shrink"]
Vote = tuple[int, str]
"""-1 shrink, 0 hold, +1 grow; and the reason in words."""
HELPED = 0.03
"""Change of the memory fraction that a halved micro-batch has to show for itself."""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Votes of the gradient norm and of memory; any shrink vote wins.

    Absolute thresholds only fire where they bracket the model's own norms: look at ``grad_norm`` in
    ``epochs.parquet`` of a ``fixed`` run before choosing them.

    Raises:
        ConfigError: a threshold out of range, a low one not below its high one, or
            ``memory_grows`` where memory has no vote.
    """

    grad_norm_high: Annotated[
        float | None, Key("mean gradient norm above which the batch halves; 10, or 2 if relative", gt=0)
    ] = None
    grad_norm_low: Annotated[
        float | None, Key("mean gradient norm below which the batch doubles; 0.1, or 0.5 if relative", ge=0)
    ] = None
    relative: Annotated[
        bool, Key("compare the norm over its median of the last relative_window decisions")
    ] = False
    relative_window: Annotated[int, Key("decisions in that median", ge=1, le=1_000)] = 10
    memory_high: Annotated[
        float,
        Key("memory fraction above which the micro-batch halves (the batch, under vote: shrink)", gt=0, le=1),
    ] = 0.8
    memory_low: Annotated[
        float, Key("under memory.vote: shrink, the batch grows only below this memory fraction", ge=0, le=1)
    ] = 0.4
    memory_grows: Annotated[
        bool, Key("under memory.vote: shrink, memory below memory_low is a vote to grow of its own")
    ] = False
    memory_vote: MemoryVote = "accumulate"

    def __post_init__(self) -> None:
        check_ranges(self)
        limits = {"grad_norm": (self.low, self.high), "memory": (self.memory_low, self.memory_high)}
        for name, (low, high) in limits.items():
            if not low < high:
                raise ConfigError(
                    f"threshold: {name}_low is {low} and {name}_high is {high}; "
                    f"allowed: {name}_low below {name}_high"
                )
        if self.memory_vote not in ("accumulate", "shrink"):
            raise ConfigError(f"memory.vote is {self.memory_vote!r}; allowed: accumulate, shrink")
        if self.memory_grows and self.memory_vote != "shrink":
            raise ConfigError("threshold: memory_grows is true; allowed only with memory.vote: shrink")

    @property
    def low(self) -> float:
        """The lower limit in force."""
        return (0.5 if self.relative else 0.1) if self.grad_norm_low is None else self.grad_norm_low

    @property
    def high(self) -> float:
        """The upper limit in force."""
        return (2.0 if self.relative else 10.0) if self.grad_norm_high is None else self.grad_norm_high

    def init(self, plan: BatchPlan) -> State:
        """No norm seen, no halving of the micro-batch so far."""
        return {"norms": [], "halved_at": None}

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """Move the global batch by at most a factor of two; under ``accumulate`` also the micro-batch."""
        norm, state = view.signal.grad_norm, state or self.init(view.plan)
        gradient = self._gradient_vote(view, state["norms"])
        if self.relative and norm is not None:
            state = {**state, "norms": [*state["norms"], norm][-self.relative_window :]}
        if self.memory_vote == "accumulate":
            proposal = _move(proposal, view, gradient[0], gradient[1])
            proposal, halved_at = self._accumulate(proposal, state["halved_at"], view)
            return proposal, {**state, "halved_at": halved_at}
        memory = self._memory_vote(view)
        reason = f"{gradient[1]}; {memory[1]}"
        vote = self._combine(gradient[0], memory[0], view.signal)
        return _move(proposal, view, vote, reason), state

    def _gradient_vote(self, view: View, norms: list[float]) -> Vote:
        norm = view.signal.grad_norm
        if norm is None:
            return 0, f"grad_norm {view.signal.why_missing('grad_norm')}: hold"
        said = f"grad_norm {norm:.4g}"
        if self.relative:
            usual = statistics.median(norms) if norms else 0.0
            if not usual > 0:
                return 0, f"{said}, nothing to compare with yet: hold"
            norm /= usual
            said = f"{said}, {norm:.3g} of its median"
        if norm > self.high:
            return -1, f"{said} > {self.high:g}: shrink"
        if norm < self.low:
            return 1, f"{said} < {self.low:g}: grow"
        return 0, f"{said} within [{self.low:g}, {self.high:g}]: hold"

    def _memory_vote(self, view: View) -> Vote:
        used = view.signal.memory_fraction
        if used is None:
            return 0, f"memory {view.signal.why_missing('memory_fraction')}: no growth"
        if used > self.memory_high:
            return -1, f"memory {used:.2f} > {self.memory_high:g}: shrink"
        if used < self.memory_low:
            return int(self.memory_grows), f"memory {used:.2f} < {self.memory_low:g}: growth allowed"
        return 0, f"memory {used:.2f} within [{self.memory_low:g}, {self.memory_high:g}]: no growth"

    def _combine(self, gradient: int, memory: int, signal: Signal) -> int:
        """A shrink vote wins; growth needs both quantities measured, and memory below ``memory_low``."""
        if min(gradient, memory) < 0:
            return -1
        used = signal.memory_fraction
        room = used is not None and used < self.memory_low
        return int(room and signal.grad_norm is not None and max(gradient, memory) > 0)

    def _accumulate(
        self, proposal: Proposal, halved_at: float | None, view: View
    ) -> tuple[Proposal, float | None]:
        """Halve the micro-batch while memory is high and halving it helps.

        ``halved_at`` is the memory fraction at the last halving: where halving did not lower it, what
        fills the memory is not the micro-batch, and halving again would only cost speed. So a reading that
        wavers around the limit costs one halving, and not one each time.
        """
        used, micro = view.signal.memory_fraction, view.plan.micro_batch_size
        if used is None:
            return proposal, halved_at
        if halved_at is not None and used < halved_at - HELPED:
            halved_at = None
        if used <= self.memory_high:
            return proposal, halved_at
        high = f"memory {used:.2f} > {self.memory_high:g}"
        if halved_at is not None and used < halved_at + HELPED:
            return proposal.because(f"{high}, but halving the micro-batch did not lower it: kept"), halved_at
        if micro == 1:
            return proposal.because(f"{high}, but the micro-batch is 1 already: kept"), halved_at
        half = -(-micro // 2)
        return proposal.because(f"{high}: micro-batch {micro} -> {half}", micro_ceiling=half), used


def _move(proposal: Proposal, view: View, vote: int, reason: str) -> Proposal:
    """Apply one combined vote: a factor of two up or down from the plan in use."""
    size = view.plan.global_batch_size
    moved = {-1: max(size // 2, 1), 0: proposal.global_batch_size, 1: size * 2}[vote]
    return proposal.because(reason, global_batch_size=moved)
