#!/usr/bin/env python
"""How long a trial takes to start: ours in a reused process, against a trainer nested in a Tune trial.

Start: from the end of the trial before in the same process (or from the search's beginning) to the first
training step. Both are measured in one run, one after the other, on two trials at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SEARCH = ROOT / "tune_configs" / "fixed_batches.yaml"


def ours(num_trials: int, folder: str) -> list[float]:
    """Seconds from Tune's decision to start a trial to its first step, of every trial."""
    from ray_dynbs.cluster.data import prepare_data
    from ray_dynbs.cluster.search.driver import plan_search, run_search
    from ray_dynbs.config.search import Candidates, load_search
    from ray_dynbs.storage.run_directory import RunDirectory
    from ray_dynbs.tasks.preflight import preflight

    sizes = ", ".join(str(16 + n) for n in range(num_trials))
    changes = [
        "space={batch.initial: {grid: [" + sizes + "]}}",
        "set.epochs=1",
        "seeds=1",
        "scheduler.name=none",
    ]
    search, place = load_search(SEARCH, changes)
    candidates = Candidates(search, place)
    found = preflight(candidates.base)
    data = prepare_data(found.sources or {}, None, found.rows)
    directory = RunDirectory.create(folder, "bench")
    records: list[Any] = []
    began = time.time()
    run_search(candidates, data, directory, records.append, plan_search(candidates, data))
    return starts([record.last for record in records], began)


def starts(trials: list[dict[str, Any]], began: float) -> list[float]:
    """Per process, from a trial's end to the next one's first step; at first from the search's beginning."""
    free_since: dict[int, float] = {}
    found = []
    for trial in sorted(trials, key=lambda each: each["ready_at"]):
        found.append(trial["ready_at"] - free_since.get(trial["process"], began))
        free_since[trial["process"]] = trial["ended_at"]
    return found


def nested(num_trials: int, folder: str) -> list[float]:
    """The same with Ray Train's trainer in a function trainable, as Ray's documentation has it."""
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def train_loop(config: dict[str, Any]) -> float:
        return time.time()

    def trial(config: dict[str, Any]) -> None:
        started = time.time()
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={},
            scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(name=f"trial-{config['number']}", storage_path=folder),
        )
        tune.report({"start_s": trainer.fit().return_value - started})

    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.1}),
        param_space={"number": tune.grid_search(list(range(num_trials)))},
        tune_config=tune.TuneConfig(max_concurrent_trials=2),
        run_config=tune.RunConfig(name="nested", storage_path=folder, verbose=0),
    )
    grid: Any = tuner.fit()
    return [float(result.metrics["start_s"]) for result in grid]


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="at most two minutes on two cores")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    from ray_dynbs.cluster.session import ray_session

    with tempfile.TemporaryDirectory() as folder, ray_session("local"):
        mine = ours(8 if options.quick else 24, folder)
        theirs = nested(2 if options.quick else 6, folder)
    row = {
        "case": "start of a one-worker CPU trial",
        "unit": "s",
        "ours": statistics.median(mine),
        "baseline": statistics.median(theirs),
        "baseline_name": "TorchTrainer nested in a Tune trial",
        "ours_repeats": mine,
        "baseline_repeats": theirs,
    }
    slowest = f"slowest {max(mine):.2f} s: the first one in a process"
    print(f"{row['case']}: median of {len(mine)} {row['ours']:.2f} s, {slowest}")
    print(f"{row['baseline_name']}: median of {len(theirs)} {row['baseline']:.2f} s")
    if options.json:
        options.json.write_text(json.dumps([row], indent=1))


if __name__ == "__main__":
    sys.exit(main())
