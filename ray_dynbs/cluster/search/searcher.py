"""Which points are tried: drawn beforehand, or suggested by Optuna from the trials so far."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState
from ray.tune.search.optuna import OptunaSearch

from ray_dynbs.config.search import Candidates
from ray_dynbs.config.space import Point, draw_points, in_order
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.tasks.loading import load_task
from ray_dynbs.tasks.preflight import check_optimizer_and_scheduler

MOST_REDRAWN = 50
"""Draws in a row that may make no configuration before a space is given up."""
Accept = Callable[[Point], bool]


def points_to_try(candidates: Candidates, accept: Accept, unusable: list[tuple[Point, str]]) -> list[Point]:
    """The points of a random or grid search, the baselines first.

    A random point whose values do not go together, or that is not accepted, is drawn again.

    Args:
        candidates: The search.
        accept: Whether a point is worth training.
        unusable: Takes the grid's points that make no configuration, and why.

    Raises:
        ConfigError: hardly any draw makes a configuration; says why the last one did not.
    """
    search, base = candidates.search, candidates.known
    only_grids = {domain.kind for domain in search.space.values()} == {"grid"}
    number = 1 if only_grids else search.search.num_trials
    found: list[Point] = []
    for place, point in enumerate(draw_points(search.space, base, number, search.search.seed)):
        if only_grids:  # a grid's points are what they are
            problem = problem_of(candidates, point)
            if problem is None:
                found.append(point)
            else:
                unusable.append((point, problem))
            continue
        found.append(_redrawn(candidates, accept, point, place))
    if not found:
        raise ConfigError(f"space: no point makes a configuration; the first: {unusable[0][1]}")
    return [*map(dict, search.baselines), *found]


def _redrawn(candidates: Candidates, accept: Accept, point: Point, place: int) -> Point:
    """A point, or another draw with the same grid values, that makes a configuration and is accepted.

    Raises:
        ConfigError: none of many draws does.
    """
    search, drawn = candidates.search, point
    for attempt in range(MOST_REDRAWN):
        problem = problem_of(candidates, drawn)
        if problem is None and accept(drawn):
            return drawn
        seed = hash((search.search.seed, place, attempt)) % 2**32
        again = draw_points(search.space, candidates.known, 1, seed)
        drawn = next((p for p in again if _same_grid(candidates, p, point)), again[0])
    why = problem or "prefilter: the simulator finds them far slower than the base"
    raise ConfigError(f"space: none of {MOST_REDRAWN} draws in a row is worth training; the last: {why}")


def _same_grid(candidates: Candidates, one: Point, other: Point) -> bool:
    grids = [key for key, domain in candidates.search.space.items() if domain.kind == "grid"]
    return all(one.get(key) == other.get(key) for key in grids)


def problem_of(candidates: Candidates, point: Point) -> str | None:
    """Why a point makes no configuration that trains."""
    try:
        check_optimizer_and_scheduler(candidates.at(point), load_task(candidates.base.task), None)
    except ConfigError as error:
        return str(error)
    return None


class OptunaPoints(OptunaSearch):
    """Ray Tune's Optuna search over a space with conditions, the baselines first.

    Args:
        candidates: The search.
        accept: Whether a point is worth training; others are told to Optuna as pruned.
        mode: Of the objective.
    """

    def __init__(self, candidates: Candidates, accept: Accept, mode: str) -> None:
        self._candidates, self._accept = candidates, accept
        self._baselines = [dict(point) for point in candidates.search.baselines]
        self._of_baselines: set[str] = set()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            super().__init__(
                space=self._suggest,
                metric="objective",
                mode=mode,
                sampler=optuna.samplers.TPESampler(seed=candidates.search.search.seed, n_startup_trials=5),
            )

    def _suggest(self, trial: optuna.Trial) -> None:
        """One value after the other, conditions looked at on the way."""
        chosen: Point = {}
        space = self._candidates.search.space
        for key in in_order(space):
            domain = space[key]
            if not domain.applies({**self._candidates.known, **chosen}):
                continue
            low, high = domain.values[0], domain.values[-1]
            if domain.kind in ("choice", "grid"):  # Optuna wants plain values: the place in the list is one
                chosen[key] = domain.values[trial.suggest_int(key, 0, len(domain.values) - 1)]
            elif domain.kind in ("int", "logint"):
                chosen[key] = trial.suggest_int(key, low, high, log=domain.kind == "logint")
            else:
                chosen[key] = trial.suggest_float(key, low, high, log=domain.kind == "loguniform")

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The next point; a baseline first, then one that makes a configuration and is accepted."""
        if self._baselines:
            self._of_baselines.add(trial_id)
            return {"point": self._baselines.pop(0)}
        for left in reversed(range(MOST_REDRAWN)):
            point = self._named(super().suggest(trial_id) or {})
            good = problem_of(self._candidates, point) is None and self._accept(point)
            if good or not left:  # the last one is tried all the same: what is wrong with it is in the table
                break
            study: Any = self._ot_study
            study.tell(self._ot_trials.pop(trial_id), state=TrialState.PRUNED)
        return {"point": point}

    def _named(self, places: dict[str, Any]) -> Point:
        """What was suggested, with the values themselves for places in a list."""
        space = self._candidates.search.space
        return {
            key: space[key].values[value] if space[key].kind in ("choice", "grid") else value
            for key, value in places.items()
        }

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Learn from a trial under way."""
        if trial_id not in self._of_baselines:
            super().on_trial_result(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Learn from a trial that has ended."""
        if trial_id in self._of_baselines:
            return
        whole = result is not None and result.get("done")  # a stopped trial's value is that of fewer epochs
        super().on_trial_complete(trial_id, result if whole else None, error)

    def save(self, checkpoint_path: str) -> None:
        """What is known so far, for a search that is gone on with."""
        state = {name: self.__dict__[name] for name in _STATE}
        Path(checkpoint_path).write_bytes(pickle.dumps(state))

    def restore(self, checkpoint_path: str) -> None:
        """The inverse of :meth:`save`: a file of this machine's own search, as all of Tune's are."""
        self.__dict__.update(pickle.loads(Path(checkpoint_path).read_bytes()))  # noqa: S301


_STATE = ("_ot_study", "_ot_trials", "_completed_trials", "_baselines", "_of_baselines")
