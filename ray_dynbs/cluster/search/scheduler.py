"""Which trials go on: successive halving, the median rule, a population, or all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ray import tune
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from ray_dynbs.cluster.search.searcher import MOST_REDRAWN, problem_of
from ray_dynbs.config.search import Candidates
from ray_dynbs.config.space import Domain, Point, draw_points


class _ToTheEnd:
    """Lets baselines train to their end: what is compared with has to be complete."""

    baselines: Sequence[Point] = ()

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Go on with a baseline; others are the scheduler's own."""
        if trial.config["point"] in self.baselines:
            return TrialScheduler.CONTINUE
        decided: str = super().on_trial_result(controller, trial, result)  # type: ignore[misc]
        return decided

    def on_trial_complete(self, controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Baselines are not counted among those that are compared."""
        if trial.config["point"] not in self.baselines:
            super().on_trial_complete(controller, trial, result)  # type: ignore[misc]


class _Halving(_ToTheEnd, ASHAScheduler):
    pass


class _Median(_ToTheEnd, MedianStoppingRule):
    pass


def make_scheduler(candidates: Candidates) -> TrialScheduler:
    """Of a search."""
    stop, epochs, mode = candidates.search.scheduler, candidates.base.epochs, candidates.base.metric.mode
    if candidates.search.search.algorithm == "pbt":
        return _population(candidates)
    common: dict[str, Any] = {
        "time_attr": "epoch",
        "metric": "score",
        "mode": mode,
        "grace_period": min(stop.grace_epochs, epochs),
    }
    made: _Halving | _Median
    if stop.name == "asha":
        made = _Halving(max_t=epochs, reduction_factor=stop.reduction_factor, **common)
    elif stop.name == "median":
        made = _Median(**common)
    else:
        return FIFOScheduler()
    made.baselines = [dict(point) for point in candidates.search.baselines]
    return made


def _population(candidates: Candidates) -> PopulationBasedTraining:
    space = candidates.search.space

    def explored(config: dict[str, Any]) -> dict[str, Any]:
        """Mutated values brought back into their ranges; others at random where they do not go together."""
        point = {key: _within(space[key], value) for key, value in config["point"].items()}
        for attempt in range(MOST_REDRAWN):
            if problem_of(candidates, point) is None:
                break
            (point,) = draw_points(space, candidates.known, 1, hash((repr(point), attempt)) % 2**32)
        return {**config, "point": point}

    return PopulationBasedTraining(
        time_attr="epoch",
        metric="current",
        mode=candidates.base.metric.mode,
        perturbation_interval=candidates.search.search.interval_epochs,
        hyperparam_mutations={"point": {key: _mutations(domain) for key, domain in space.items()}},
        custom_explore_fn=explored,
        synch=False,
    )


def _mutations(domain: Domain) -> Any:
    if domain.kind in ("choice", "grid"):
        return list(domain.values)
    low, high = domain.values
    kinds: dict[str, Callable[[Any, Any], Any]] = {
        "uniform": tune.uniform,
        "loguniform": tune.loguniform,
        "int": tune.randint,
        "logint": tune.lograndint,
    }
    return kinds[domain.kind](low, high if domain.kind in ("uniform", "loguniform") else high + 1)


def _within(domain: Domain, value: Any) -> Any:
    if domain.kind in ("choice", "grid"):
        return value
    low, high = domain.values
    value = min(max(value, low), high)
    return round(value) if domain.kind in ("int", "logint") else float(value)
