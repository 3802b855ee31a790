"""``goodput``: the batch with the most useful rows per second (Pollux, OSDI 2021).

Goodput is throughput times statistical efficiency: rows per second, times the progress a row makes over
that at the reference batch. The first comes from a model of the step time, fitted to what was seen, the
second from the gradient noise scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ray_dynbs.core.estimators.step_time import (
    PLAUSIBLE_S,
    Observation,
    StepTimeModel,
    as_rows,
    efficiency,
    fit_step_time,
    from_rows,
)
from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.core.policy import Proposal, State, View

KEPT_KINDS = 50
CANDIDATES_PER_OCTAVE = 8
FULL_ENOUGH = 0.75
"""Mean rows of the steps over the batch size below which their time says nothing about that size."""
REMEMBERED = 0.5
"""Weight of the time known so far when the same kind of step is seen again."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Move to the best size within twice the largest seen, where it is better by at least ``gain``.

    With one size seen, another is tried where it would pay at best: fixed and growing time cannot be told
    apart otherwise.

    Raises:
        ConfigError: a key out of range.
    """

    gain: Annotated[float, Key("relative gain of goodput that is worth a change", ge=0)] = 0.05
    tolerance: Annotated[float, Key("largest relative error of the noise scale to act on", gt=0)] = 0.5

    def __post_init__(self) -> None:
        check_ranges(self)

    def init(self, plan: BatchPlan) -> State:
        """No step seen."""
        return {"seen": [], "largest": 0}

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """Remember the step time, and compare sizes where the noise scale is known."""
        state = _remember(state, view)
        noise, size = view.estimates.noise_scale, view.plan.global_batch_size
        if noise is None or view.signal.pieces is None:
            return proposal.because(f"goodput: noise_scale {view.signal.why_missing('pieces')}: hold"), state
        if view.signal.step_time_s is None:
            return proposal.because(
                f"goodput: step_time_s {view.signal.why_missing('step_time_s')}: hold"
            ), state
        if not noise.within(self.tolerance) or not noise.value > 0:
            error = f"{noise.relative_error:.0%}" if math.isfinite(noise.relative_error) else "unknown"
            said = f"goodput: noise_scale {noise.value:.4g} +- {error}, {self.tolerance:.0%} allowed"
            return proposal.because(f"{said}: wait"), state
        seen = from_rows(state["seen"])
        reference = view.reference_batch_size or size
        if len({(each.ranks, each.micro, each.extra) for each in seen}) < 2:
            return self._explore(proposal, noise.value, reference, view), state
        model = fit_step_time(seen)
        here = _goodput(model, size, noise.value, reference, view)
        best = max(
            _candidates(size, reference, int(state["largest"]), view),
            key=lambda batch: _goodput(model, batch, noise.value, reference, view),
        )
        more = _goodput(model, best, noise.value, reference, view) / here - 1
        said = f"goodput: {best} would give {more:+.1%} at noise_scale {noise.value:.4g}"
        if best == size or more < self.gain:
            return proposal.because(f"{said}: hold"), state
        return proposal.because(f"{said}: {size} -> {best}", global_batch_size=best), state

    def _explore(self, proposal: Proposal, noise: float, reference: int, view: View) -> Proposal:
        """Another size to learn from: twice, if it pays in the same time; half, if it pays in half."""
        size = view.plan.global_batch_size
        here = efficiency(size, noise, reference)
        twice = 2 * efficiency(2 * size, noise, reference) / here - 1
        half = efficiency(size // 2, noise, reference) / here - 1
        _, largest = view.bounds or (1, 2 * size)
        if twice >= max(self.gain, half) and largest > size:
            wanted = min(2 * size, largest)
        elif half >= self.gain and size // 2 >= reference:
            wanted = size // 2
        else:
            below = f" (below the reference batch of {reference})" if size // 2 < reference else ""
            said = f"goodput: {2 * size} gives at most {twice:+.1%}, half {half:+.1%}{below}"
            return proposal.because(f"{said}: hold")
        return proposal.because(
            f"goodput: {size} -> {wanted} to learn the step time", global_batch_size=wanted
        )


def _remember(state: State, view: View) -> State:
    seconds, plan = view.signal.step_time_s, view.plan
    if seconds is None or not PLAUSIBLE_S[0] < seconds < PLAUSIBLE_S[1]:
        return state
    # A pass's last step has fewer rows: where it weighs, the mean time is not that of a full step.
    full = view.signal.rows / (view.signal.num_steps * plan.global_batch_size) if view.signal.rows else 1.0
    if full < FULL_ENOUGH:
        return state
    new = Observation(plan.world_size, plan.micro_batch_size, plan.grad_accum_steps - 1, seconds)
    kept = []
    for old in from_rows(state["seen"]):
        if (old.ranks, old.micro, old.extra) == (new.ranks, new.micro, new.extra):
            mean = REMEMBERED * old.seconds + (1 - REMEMBERED) * seconds
            new = Observation(new.ranks, new.micro, new.extra, mean)
        else:
            kept.append(old)
    return {
        "seen": as_rows([*kept, new][-KEPT_KINDS:]),
        "largest": max(int(state["largest"]), plan.global_batch_size),
    }


def _candidates(size: int, reference: int, largest_seen: int, view: View) -> Sequence[int]:
    """Sizes from the reference to twice the largest seen, evenly in their logarithm, and the one in use.

    None beyond the run's bounds: a gain that cannot be had would make a small one look worth a change.
    """
    top, found, exact = 2 * max(largest_seen, size), [size], float(min(reference, size))
    while round(exact) <= top:
        found.append(round(exact))
        exact *= 2 ** (1 / CANDIDATES_PER_OCTAVE)
    smallest, largest = view.bounds or (1, top)
    return sorted({min(max(each, smallest), largest) for each in found})


def _goodput(model: StepTimeModel, batch: int, noise: float, reference: int, view: View) -> float:
    plan = BatchPlan.fit(batch, view.plan.world_size, view.micro_ceiling)
    seconds = model.seconds(plan.world_size, plan.micro_batch_size, plan.grad_accum_steps - 1)
    return batch / seconds * efficiency(batch, noise, reference)
