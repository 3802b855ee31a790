"""Which trials go on: successive halving, the median rule, a population, or all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import tune
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from ray_dynbs.cluster.search.searcher import problem_of
from ray_dynbs.config.search import Candidates
from ray_dynbs.config.space import Domain


def make_scheduler(candidates: Candidates) -> TrialScheduler:
    """Of a search."""
    stop, epochs, mode = candidates.search.scheduler, candidates.base.epochs, candidates.base.metric.mode
    if candidates.search.search.algorithm == "pbt":
        return _population(candidates)
    if stop.name == "asha":
        return ASHAScheduler(
            time_attr="epoch",
            metric="score",
            mode=mode,
            max_t=epochs,
            grace_period=min(stop.grace_epochs, epochs),
            reduction_factor=stop.reduction_factor,
        )
    if stop.name == "median":
        return MedianStoppingRule(
            time_attr="epoch", metric="score", mode=mode, grace_period=stop.grace_epochs
        )
    return FIFOScheduler()


def _population(candidates: Candidates) -> PopulationBasedTraining:
    space = candidates.search.space

    def explored(config: dict[str, Any]) -> dict[str, Any]:
        """Mutated values brought back into their ranges; the base's where they do not go together."""
        point = {key: _within(space[key], value) for key, value in config["point"].items()}
        if problem_of(candidates, point) is not None:
            point = {key: candidates.known.get(key, value) for key, value in point.items()}
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
