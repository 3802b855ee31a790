"""One rank of a trial: a worker for every seed, trained epoch by epoch in turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ray_dynbs.cluster.coordinator import Coordinator, LocalLink
from ray_dynbs.cluster.setup import Stores, build_parts
from ray_dynbs.cluster.worker import Worker
from ray_dynbs.config import Config
from ray_dynbs.config.load import dump_yaml
from ray_dynbs.core.probed import ProbeResult
from ray_dynbs.storage.run_directory import CONFIG, RunDirectory
from ray_dynbs.training.world import World


@dataclass(frozen=True)
class EpochOfTrial:
    """What a trial has come to at an epoch's end; the same on every rank.

    Attributes:
        epoch: Epochs trained.
        value: Mean over the seeds of each one's best metric so far; NaN where one has none.
        spread: Their standard deviation; 0 for one seed.
        values: Each seed's.
        current: Mean over the seeds of the metric at this epoch's end; NaN likewise.
        time_s: Training time so far, mean over the seeds.
        samples: Rows so far, per seed.
        steps: Optimizer steps so far, mean over the seeds.
        batch_size: Global batch that this epoch began with, mean over the seeds.
    """

    epoch: int
    value: float
    spread: float
    values: tuple[float, ...]
    current: float
    time_s: float
    samples: float
    steps: float
    batch_size: float

    def to_json(self) -> dict[str, Any]:
        """As Tune takes it."""
        return asdict(self)


class Ensemble:
    """Trains a configuration with several seeds in one process, each exactly as a run of its own would.

    Args:
        config: The configuration; its own seed is the first.
        num_seeds: Seeds, counted up from there.
        stores: Rows, shared by all.
        world: The ranks.
        folder: Where each seed's run directory lies, ``seed-<n>``.
        restored: Folder of checkpoints to go on from, or ``None``.
        share: Fraction of the memory that is each rank's own.
        probes: What was found to fit in memory, by trials before this one in the same process.
    """

    def __init__(
        self,
        config: Config,
        num_seeds: int,
        stores: Stores,
        world: World,
        *,
        folder: str,
        restored: Path | None = None,
        share: float = 1.0,
        probes: dict[str, ProbeResult] | None = None,
    ) -> None:
        probes = {} if probes is None else probes
        self._metric = config.metric
        self._workers: list[Worker] = []
        self._best: list[float] = []
        self._time_s = [0.0] * num_seeds
        for seed in range(config.seed, config.seed + num_seeds):
            own = config.model_copy(update={"seed": seed})
            run = RunDirectory(f"{folder}/seed-{seed}")
            if world.rank == 0:
                run.make()
                run.write_text(CONFIG, dump_yaml(own))
            link = LocalLink(Coordinator(own, run))
            parts = build_parts(own, world, stores, share, siblings=num_seeds - 1)
            checkpoint = None if restored is None else restored / f"seed-{seed}"
            self._workers.append(Worker(parts, run, link, checkpoint, probes=probes))
            earlier = [row for row in run.read_epochs() if row["epoch"] < self._workers[-1].progress.epoch]
            counted = {row["epoch"]: row for row in earlier}.values()
            self._time_s[len(self._workers) - 1] = sum(row["epoch_time_s"] for row in counted)
            self._best.append(self._best_so_far(self._workers[-1], list(counted)))

    def _best_so_far(self, worker: Worker, rows: list[dict[str, Any]]) -> float:
        """Of a worker that goes on: its checkpoint's, or without validation rows the best training loss."""
        if worker.best is not None:
            return float(worker.best)
        losses = [row["train_loss"] for row in rows if row["train_loss"] is not None]
        return min(losses, default=math.nan) if self._metric.name == "loss" else math.nan

    @property
    def epoch(self) -> int:
        """Epochs trained."""
        return self._workers[0].progress.epoch

    def train_epoch(self) -> EpochOfTrial:
        """One epoch of every seed."""
        sizes, current = [], []
        for number, worker in enumerate(self._workers):
            sizes.append(worker.batch_size)
            report = worker.train_epoch()
            self._time_s[number] += report.epoch_time_s
            value = self._value(worker, report.totals.loss)
            current.append(value)
            self._best[number] = _better(self._best[number], value, self._metric.mode)
        progress = [worker.progress for worker in self._workers]
        return EpochOfTrial(
            epoch=self.epoch,
            value=statistics.fmean(self._best),
            spread=float(np.std(self._best, ddof=1)) if len(self._best) > 1 else 0.0,
            values=tuple(self._best),
            current=statistics.fmean(current),
            time_s=statistics.fmean(self._time_s),
            samples=statistics.fmean(each.samples_seen for each in progress),
            steps=statistics.fmean(each.step for each in progress),
            batch_size=statistics.fmean(sizes),
        )

    def _value(self, worker: Worker, train_loss: float) -> float:
        """The metric at the end of an epoch; without validation rows the training loss stands for loss."""
        without = train_loss if self._metric.name == "loss" else math.nan
        return worker.validation.get(self._metric.name, without)

    def write_checkpoints(self, folder: Path) -> None:
        """Every seed's checkpoint into a folder of its own; on rank 0."""
        for worker in self._workers:
            own = folder / f"seed-{worker.seed}"
            own.mkdir()
            worker.write_checkpoint(own)


def _better(best: float, value: float, mode: str) -> float:
    """The better one of two; NaN is worse than anything."""
    known: Sequence[float] = [each for each in (best, value) if not math.isnan(each)]
    return (max if mode == "max" else min)(known) if known else math.nan
