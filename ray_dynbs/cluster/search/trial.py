"""One trial as Ray Tune runs it, in a process that serves one trial after the other."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSelector, FileSystem, FileType
from ray import tune

from ray_dynbs.cluster.search.group import Group, OneRank, RanksInActors, TrialInput
from ray_dynbs.config import Config
from ray_dynbs.config.search import Candidates, TargetSection
from ray_dynbs.storage.search_directory import RESULTS, read_results, trial_directory

UNREACHED = 1e18
"""Cost of a target that was not reached."""
_WHOLE = "whole.json"
"""A checkpoint's list of its files -> bytes: one that was not copied to its end does not fit its list."""


@dataclass(frozen=True)
class SearchInput:
    """What every trial is given.

    Attributes:
        candidates: Makes a configuration of a point.
        given: What it is trained on.
        folder: Of the search; trials have theirs in ``trials``.
    """

    candidates: Candidates
    given: TrialInput
    folder: str


class Trial(tune.Trainable):
    """A point of the space, trained epoch by epoch; Tune decides after each whether it goes on."""

    def setup(self, config: dict[str, Any], search: SearchInput | None = None) -> None:
        """Take the first trial of this process; it begins with its first step, or with a checkpoint.

        Raises:
            TypeError: the search is missing.
        """
        if search is None:
            raise TypeError("a trial needs its search")
        self._search = search
        self._group: Group | None = None
        self._take(config)

    def _take(self, config: dict[str, Any]) -> None:
        self._point, self._begun = dict(config["point"]), False

    def _begin(self, restored: str | None) -> None:
        """Build everything, at a checkpoint's place if there is one.

        Raises:
            ConfigError: the point's values do not go together.
        """
        self._begun = True
        workers_before = self._config.cluster.worker_range[0] if self._group is not None else 0
        self._config: Config = self._search.candidates.at(self._point)
        self._record = trial_directory(self._search.folder, self.trial_id)
        self._record.make()
        self._results: list[dict[str, Any]] = []
        self._again: list[dict[str, Any]] = []
        # The trial's own record: a resumed search does not train again what is complete in it.
        earlier = read_results(self._search.folder, self.trial_id)
        if earlier and earlier[-1]["done"]:  # complete already: told again, not trained again
            self._again = earlier if restored is None else earlier[-1:]
            return
        workers = self._config.cluster.worker_range[0]
        if workers_before not in (0, workers):
            self.cleanup()
        if self._group is None:
            given = self._search.given
            self._group = OneRank(given) if workers == 1 else RanksInActors(given, workers)
        epochs = self._group.begin(self._config, self._record.uri, restored)
        self._results = earlier[:epochs]
        self._ready_at = time.time()  # the first step is next

    def step(self) -> dict[str, Any]:
        """One epoch.

        Raises:
            RuntimeError: there is no trial.
        """
        if not self._begun:
            self._begin(None)
        if self._again:
            return self._again.pop(0)
        if self._group is None:
            raise RuntimeError("the trial has ended")
        found = self._group.train_epoch().to_json()
        when = {"ready_at": self._ready_at, "ended_at": time.time(), "process": os.getpid()}
        result = {**found, **when, "point": self._point}
        mode = self._config.metric.mode
        result["score"] = _known(result["value"], mode)
        result["current"] = _known(result["current"], mode)
        result["cost"] = self._cost(result)
        result["objective"] = result["score"] if self._target is None else result["cost"]
        reached = result["cost"] is not None and result["cost"] < UNREACHED
        result["done"] = found["epoch"] >= self._config.epochs or (reached and self._target is not None)
        self._results.append(result)
        self._record.write_text(RESULTS, json.dumps(self._results))
        return dict(result)

    @property
    def _target(self) -> TargetSection | None:
        return self._search.candidates.search.target

    def _cost(self, result: dict[str, Any]) -> float | None:
        """What it took to reach the target; ``None`` without one."""
        target = self._target
        if target is None:
            return None
        value, mode = result["current"], self._config.metric.mode
        reached = value >= target.value if mode == "max" else value <= target.value
        return float(result[target.cost]) if reached else UNREACHED

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Begin another trial in this process: no import, no data to fetch."""
        self._take(new_config)
        return True

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Everything to go on from, also by another trial whose thresholds differ."""
        if self._begun and self._group is not None and not self._again:
            self._group.write_checkpoints(checkpoint_dir)
            folder = Path(checkpoint_dir)
            sizes = {
                path.relative_to(folder).as_posix(): path.stat().st_size
                for path in folder.rglob("*")
                if path.is_file()
            }
            (folder / _WHOLE).write_text(json.dumps(sizes))

    def restore(self, checkpoint_path: Any) -> None:
        """Go on from a checkpoint, or from a later one that a driver, killed since, had replaced it by."""
        checkpoint = getattr(checkpoint_path, "checkpoint", None)
        if checkpoint is not None:
            checkpoint_path.checkpoint = still_there(checkpoint)
        super().restore(checkpoint_path)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Go on from there, with this trial's own point."""
        self._begin(str(checkpoint))

    def cleanup(self) -> None:
        """Leave nothing behind."""
        if self._group is not None:
            self._group.end()
            self._group = None


def still_there(checkpoint: Any) -> Any:
    """The checkpoint itself, or where it is gone the newest whole one beside it."""
    files, path = checkpoint.filesystem, checkpoint.path.rstrip("/")
    if files.get_file_info(path).type != FileType.NotFound:
        return checkpoint
    beside = files.get_file_info(FileSelector(path.rpartition("/")[0], allow_not_found=True))
    names = sorted(each.path for each in beside if each.base_name.startswith("checkpoint_"))
    whole = next((name for name in reversed(names) if _is_whole(files, name)), None)
    return type(checkpoint)(whole, filesystem=files) if whole else checkpoint


def _is_whole(files: FileSystem, folder: str) -> bool:
    """Whether every file is there as it was written: who was killed while copying leaves less."""
    try:
        with files.open_input_stream(f"{folder}/{_WHOLE}") as stream:
            sizes = json.loads(stream.read())
    except (OSError, ValueError):
        return False
    found = files.get_file_info([f"{folder}/{name}" for name in sizes])
    return [each.size for each in found] == list(sizes.values())


def _known(value: float, mode: str) -> float:
    """A number that ranks: what is not known is worse than anything."""
    if math.isfinite(value):
        return value
    return -UNREACHED if mode == "max" else UNREACHED
