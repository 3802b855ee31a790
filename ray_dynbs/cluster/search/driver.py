"""The driver of a search: Ray Tune over trials that reuse their processes and share their data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial

from ray_dynbs.cluster.data import PreparedData
from ray_dynbs.cluster.search.group import TrialInput
from ray_dynbs.cluster.search.prefilter import FILTERED, make_filter
from ray_dynbs.cluster.search.record import TrialRecord, first_cause, record_of_trial
from ray_dynbs.cluster.search.scheduler import make_scheduler
from ray_dynbs.cluster.search.searcher import Accept, OptunaPoints, points_to_try
from ray_dynbs.cluster.search.trial import SearchInput, Trial
from ray_dynbs.config.search import Candidates, Search
from ray_dynbs.config.space import Point
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.storage.run_directory import RunDirectory
from ray_dynbs.storage.search_directory import DECIDED, read_unseen, trial_directory, write_unseen

TUNE_FOLDER = "tune"
"""Tune's own folder inside the search's: its trials' checkpoints, and what a resume goes on from."""
TUNE_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # no files of its own about every result
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends the search; what was recorded is gone on with
    "TUNE_GLOBAL_CHECKPOINT_S": "2",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


OnTrial = Callable[[TrialRecord], None]


def check_room(candidates: Candidates) -> None:
    """See that the connected cluster has room for one trial.

    Raises:
        ConfigError: it has not, and nobody would ever say so; names what is missing.
    """
    there, search = ray.cluster_resources(), candidates.search
    workers = candidates.base.cluster.worker_range[0]
    for name, each in (("CPU", search.resources.cpu), ("GPU", search.resources.gpu)):
        needed = workers * each
        if needed > there.get(name, 0.0) + 1e-9:
            raise ConfigError(
                f"resources.{name.lower()} is {each:g} for each of {workers} workers: a trial needs "
                f"{needed:g} {name}, the cluster has {there.get(name, 0.0):g}"
            )


@dataclass(frozen=True)
class Plan:
    """What a search is going to try.

    Attributes:
        points: Drawn beforehand, baselines included; ``None`` where Optuna suggests them.
        accept: Whether a suggested point is worth training.
        unseen: Points that are not trained, and why; grows while Optuna suggests.
    """

    points: list[Point] | None
    accept: Accept
    unseen: list[tuple[Point, str]]


def plan_search(candidates: Candidates, data: PreparedData) -> Plan:
    """Draw the points of a new search, before anything is written.

    Raises:
        ConfigError: a space in which next to nothing makes a configuration.
    """
    unseen: list[tuple[Point, str]] = []
    accept = make_filter(candidates, data.num_rows["train"], unseen)
    if candidates.search.search.algorithm == "optuna":
        return Plan(None, accept, unseen)
    return Plan(points_to_try(candidates, accept, unseen), accept, unseen)


def run_search(
    candidates: Candidates, data: PreparedData, folder: RunDirectory, on_trial: OnTrial, plan: Plan | None
) -> list[TrialRecord]:
    """Run all trials, or those that are left, on the connected cluster.

    Args:
        candidates: The search.
        data: Its rows, prepared once.
        folder: The search's directory, which exists.
        on_trial: Called in this process for every trial that ends.
        plan: Of a new search; ``None`` to go on with what the directory holds.

    Raises:
        ConfigError: there is nothing to go on with, and a space in which nothing makes a configuration.
    """
    os.environ.update(TUNE_SETTINGS)
    search, uri = candidates.search, folder.absolute_uri
    given = TrialInput(
        data.blocks,
        search.seeds,
        search.resources.cpu,
        search.resources.gpu,
        _share_of_memory(candidates, None if plan is None or plan.points is None else len(plan.points)),
    )
    shared = SearchInput(candidates, given, uri)
    trainable: Any = tune.with_resources(tune.with_parameters(Trial, search=shared), _resources(candidates))
    path = f"{uri}/{TUNE_FOLDER}"
    earlier = read_unseen(folder)
    if plan is None and tune.Tuner.can_restore(path):
        tuner = tune.Tuner.restore(path, trainable, resume_unfinished=True, restart_errored=False)
        unseen: list[tuple[Point, str]] = []
    else:
        plan = plan or plan_search(candidates, data)
        tuner, unseen = _new_tuner(trainable, candidates, plan, uri), plan.unseen
    try:
        with _listening(on_trial) as ended:
            tuner.fit()
    finally:
        write_unseen(folder, [*earlier, *unseen])
    records = [record_of_trial(uri, each.trial_id, each.config["point"], _error(each)) for each in ended]
    for point, why in read_unseen(folder):
        status = "filtered" if why == FILTERED else "unusable"
        records.append(TrialRecord("", dict(point), status, error="" if status == "filtered" else why))
    return records


def _share_of_memory(candidates: Candidates, num_points: int | None) -> float:
    """Fraction of a node's memory for each rank: trials that run at once share it.

    Args:
        candidates: The search.
        num_points: Trials there will be, where that is known.
    """
    search, workers = candidates.search, candidates.base.cluster.worker_range[0]
    cpus = max((node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
    room = max(cpus / search.resources.cpu if search.resources.cpu else workers, 1.0)
    concurrency = room if search.concurrency == "auto" else search.concurrency * workers
    trials = room if num_points is None else num_points * workers
    return 1.0 / max(min(room, concurrency, trials), 1.0)


def _new_tuner(trainable: Any, candidates: Candidates, plan: Plan, folder: str) -> tune.Tuner:
    search = candidates.search
    mode = "min" if search.target else candidates.base.metric.mode
    searcher, samples = None, 1
    space: dict[str, Any] = {}
    if plan.points is None:
        searcher = OptunaPoints(candidates, plan.accept, mode)
        samples = search.search.num_trials + len(search.baselines)
    else:
        space = {"point": tune.grid_search(plan.points)}
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=make_scheduler(candidates),
            num_samples=samples,
            max_concurrent_trials=None if search.concurrency == "auto" else search.concurrency,
            time_budget_s=search.time_budget_s,
            reuse_actors=True,
            trial_name_creator=_trial_id,
            trial_dirname_creator=_trial_id,
        ),
        run_config=tune.RunConfig(
            name=TUNE_FOLDER,
            storage_path=folder,
            verbose=0,
            callbacks=[_Teller(folder)],
            checkpoint_config=tune.CheckpointConfig(num_to_keep=_kept(search), checkpoint_frequency=1),
        ),
    )


def _kept(search: Search) -> int:
    """Checkpoints of a trial: the newest one; in a population those that others may be about to take over."""
    return 10 if search.search.algorithm == "pbt" else 1


def _trial_id(trial: TuneTrial) -> str:
    return str(trial.trial_id)


def _resources(candidates: Candidates) -> tune.PlacementGroupFactory:
    """A bundle per worker; among several, an empty one, which Ray drops, for the trial itself."""
    resources, workers = candidates.search.resources, candidates.base.cluster.worker_range[0]
    each = {"CPU": resources.cpu, **({"GPU": resources.gpu} if resources.gpu else {})}
    return tune.PlacementGroupFactory([each] if workers == 1 else [{}, *[dict(each) for _ in range(workers)]])


_listeners: list[OnTrial] = []
_ended: list[TuneTrial] = []
"""Tune saves its callbacks with the search, so they must not hold on to who listens in this process."""


@contextmanager
def _listening(on_trial: OnTrial) -> Iterator[list[TuneTrial]]:
    """Hear of every trial that ends; yields what holds all trials once the search has ended."""
    _listeners[:], _ended[:] = [on_trial], []
    try:
        yield _ended
    finally:
        _listeners.clear()


class _Teller(tune.Callback):
    """Tells the listener of this process about every trial that ends.

    Args:
        folder: Of the search.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has finished, or its scheduler has stopped it; the time budget ends them without a word."""
        own = trial_directory(self._folder, trial.trial_id)
        own.make()
        own.write_text(DECIDED, "")
        self._tell(trial, "")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has failed."""
        self._tell(trial, _error(trial) or "it failed without a word")

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """All trials have ended, those of an earlier part of the search included."""
        _ended[:] = trials

    def _tell(self, trial: Any, error: str) -> None:
        for listener in _listeners:
            listener(record_of_trial(self._folder, trial.trial_id, trial.config["point"], error))


def _error(trial: Any) -> str:
    """Why a trial failed; empty where it did not."""
    name = trial.run_metadata.error_filename
    if name is None:
        return ""
    here = Path(trial.local_path or "") / name  # it comes to the search's storage only later
    return first_cause(here.read_text() if here.exists() else trial.get_error())
