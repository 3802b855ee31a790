"""What runs in every Ray Train worker of a configured run: train, evaluate, decide, save, per epoch."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch

from ray_dynbs.cluster.agreement import Agreement
from ray_dynbs.cluster.coordinator import ActorLink, Link
from ray_dynbs.cluster.data import Blocks
from ray_dynbs.cluster.setup import Parts, build_parts, open_stores
from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.probed import ProbeResult
from ray_dynbs.storage.run_directory import MODEL, RunDirectory
from ray_dynbs.training.loop import TrainingLoop
from ray_dynbs.training.probe import unless_it_fails
from ray_dynbs.training.reports import EpochReport, Progress
from ray_dynbs.training.world import World


@dataclass(frozen=True)
class WorkerInput:
    """What the driver hands to every worker."""

    config: Config
    run: RunDirectory
    blocks: dict[str, Blocks]
    coordinator: Any


def train_worker(loop_config: dict[str, Any]) -> dict[str, Any]:
    """The train loop given to Ray Train; returns the best value of the metric and the epochs done."""
    return open_worker(loop_config["input"]).train()


def open_worker(given: WorkerInput) -> Worker:
    """This process's worker of a run under Ray Train, at its newest checkpoint's place if there is one."""
    world = World.current(ray.train.torch.get_device())
    parts = build_parts(given.config, world, open_stores(given.config, given.blocks))
    saved = ray.train.get_checkpoint()
    with saved.as_directory() if saved else contextlib.nullcontext() as folder:
        return Worker(parts, given.run, ActorLink(given.coordinator), folder, keep=report_checkpoint)


def report_checkpoint(epoch: int, name: str, write: Callable[[Path], None] | None) -> None:
    """Report a checkpoint to Ray Train: a barrier that every rank passes equally often.

    Args:
        epoch: Epochs finished.
        name: Of the checkpoint, the same on every rank.
        write: Writes it into a folder; ``None`` on ranks that have nothing to write.
    """
    if write is None:
        ray.train.report({"epoch": epoch}, checkpoint_dir_name=name)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        saved = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"epoch": epoch}, checkpoint=saved, checkpoint_dir_name=name)


Keep = Callable[[int, str, "Callable[[Path], None] | None"], None]
"""Takes a checkpoint: see :func:`report_checkpoint`."""


class Worker:
    """One rank of a run.

    Args:
        parts: What it trains with.
        run: The run's directory, for the best model.
        coordinator: The way to it.
        restored: Folder of the checkpoint to go on from, or ``None``.
        keep: Takes each checkpoint; ``None`` where somebody else asks for them.
        probes: What was found to fit, by :attr:`~ray_dynbs.cluster.setup.Parts.memory_key`; of all trials in
            this process, each of which would find the same.
    """

    def __init__(
        self,
        parts: Parts,
        run: RunDirectory,
        coordinator: Link,
        restored: str | Path | None,
        *,
        keep: Keep | None = None,
        probes: dict[str, ProbeResult] | None = None,
    ) -> None:
        self._parts, self._run, self._keep, self._probes = parts, run, keep, probes
        self._config, self._world = parts.config, parts.world
        self._best: float | None = None
        self._fits: int | None = None
        self._validation: dict[str, float] = {}
        self._validated: dict[str, float] = {}
        self._parts.check_metrics()
        self._step = parts.make_step()
        self._loop, state, notes = self._restore(restored)
        self._saved_step = self._loop.progress.step
        self._saved_samples = self._loop.progress.samples_seen
        self._agreement = Agreement(
            coordinator, self._world, metric=self._config.metric.name, apply=self._loop.apply
        )
        self._agreement.notes += notes
        self._agreement.start(self._parts.feed.num_rows, state, self._probed(state))

    def _probed(self, state: dict[str, Any] | None) -> int | None:
        """Most rows in one forward/backward, if anything sets a limit.

        Looked for before the first step of every incarnation: there may be other workers, or less memory.
        Speed is asked about once, so that a restart trains in the micro-batches that there were.
        """
        if self._config.memory.probe == "off":
            return None
        found, notes = unless_it_fails(lambda: self._probe(state))
        self._agreement.notes += notes
        if found is None:
            return None
        self._fits = found.largest
        return found.ceiling

    def _probe(self, state: dict[str, Any] | None) -> ProbeResult:
        if self._probes is None:
            known = None if state is None else state["micro_ceiling"]
            return self._parts.probe_memory(self._step, known=known, sweep=state is None)
        key = self._parts.memory_key
        if key not in self._probes:
            self._probes[key] = self._parts.probe_memory(self._step)
        return self._probes[key]

    @property
    def progress(self) -> Progress:
        """Where it is."""
        return self._loop.progress

    @property
    def seed(self) -> int:
        """Of its random numbers."""
        return self._config.seed

    @property
    def batch_size(self) -> int:
        """Global batch in force, rows."""
        return self._agreement.decision.plan.global_batch_size

    @property
    def best(self) -> float | None:
        """Best value of the metric so far."""
        return self._best

    @property
    def validation(self) -> dict[str, float]:
        """Loss and metrics at the end of the last epoch; empty without validation rows."""
        return self._validated

    def train(self) -> dict[str, Any]:
        """All epochs that are left."""
        while self._loop.progress.epoch < self._config.epochs:
            self.train_epoch()
        return {"best": self._best, "epochs": self._loop.progress.epoch}

    def train_epoch(self) -> EpochReport:
        """One pass: train, evaluate, decide, save."""
        report = self._loop.train_epoch(self._parts.loss, self._after_step)
        validation = self._validated = self._evaluate()
        self._parts.state.schedule.after_epoch(validation.get("loss", report.totals.loss))
        self._agreement.notes += self._loop.take_notes()
        self._agreement.decide(report, self._loop.progress, validation)
        self._validation = {}
        self._save()
        return report

    def _evaluate(self) -> dict[str, float]:
        """Loss and metrics over the validation rows; the best model so far is kept."""
        progress = self._loop.progress
        progress.evaluated_step, progress.evaluated_samples = progress.step, progress.samples_seen
        found = self._parts.evaluate(self._agreement.decision.plan.micro_batch_size, self._fits)
        self._keep_best(found)
        return found

    def _after_step(self) -> None:
        """Within a pass: evaluate, decide, save, where that is due; the same on all ranks."""
        loop, progress = self._loop, self._loop.progress
        since = progress.step - progress.evaluated_step, progress.samples_seen - progress.evaluated_samples
        if self._config.evaluate.cadence.due(*since):
            with loop.aside():
                self._validation = self._evaluate()
            self._agreement.evaluated(progress, self._validation)
        if loop.decision_due:
            self._agreement.decide_within(loop.report_interval(), progress, self._validation)
            self._validation = {}
        since = progress.step - self._saved_step, progress.samples_seen - self._saved_samples
        if self._config.checkpoint.cadence.due(*since):
            with loop.aside():
                self._save()
            loop.reseed()

    def _restore(self, folder: str | Path | None) -> tuple[TrainingLoop, dict[str, Any] | None, list[str]]:
        """The loop at a checkpoint's place if there is one, its manager state, and what to say."""
        if folder is None:
            return self._parts.make_loop(self._step, Progress()), None, []
        restored = self._parts.state.load(Path(folder), self._world.device)
        self._best, self._validation = restored["best"], restored["validation"]
        num_rows, notes = self._parts.feed.num_rows, []
        self._refuse_other_rows_within(restored)
        if restored["num_rows"] != num_rows:
            notes.append(
                f"the checkpoint was trained on {restored['num_rows']} rows, there are {num_rows} now: "
                "the new ones are used, and a per-step schedule goes on from where it was"
            )
        loop = self._parts.make_loop(self._step, Progress(**restored["progress"]))
        loop.load_state_dict(restored["loop"])
        return loop, restored["manager"], notes

    def _refuse_other_rows_within(self, restored: dict[str, Any]) -> None:
        """A position within a pass means nothing in another order, or among other rows.

        Raises:
            ConfigError: the checkpoint lies there, and rows, seed or shuffle are others now.
        """
        if not restored["progress"]["rows_in_epoch"]:
            return
        for key, now in self._order.items():
            if restored[key] != now:
                raise ConfigError(
                    f"{key} was {restored[key]}, is {now} now, and the checkpoint lies within an epoch; "
                    "allowed: the same"
                )

    @property
    def _order(self) -> dict[str, Any]:
        """What a position within a pass refers to."""
        config = self._config
        return {"num_rows": self._parts.feed.num_rows, "seed": config.seed, "shuffle": config.data.shuffle}

    def _keep_best(self, validation: dict[str, float]) -> None:
        """Write ``model.pt`` where the metric is the best so far; always, while there is no best yet."""
        metric, best = self._config.metric, self._best
        value = validation.get(metric.name, math.nan)
        if best is not None and not (value > best if metric.mode == "max" else value < best):
            return
        if math.isfinite(value):
            self._best = value
        if self._world.rank == 0:
            buffer = io.BytesIO()
            torch.save(self._parts.state.model.state_dict(), buffer)
            self._run.write_bytes(MODEL, buffer.getvalue())

    def _save(self) -> None:
        """Hand a checkpoint on, on every rank at the same step."""
        progress = self._loop.progress
        self._saved_step, self._saved_samples = progress.step, progress.samples_seen
        if self._keep is None:
            return
        within = f"-step-{progress.steps_in_epoch:08d}" if progress.steps_in_epoch else ""
        name = f"epoch-{progress.epoch:05d}{within}-incarnation-{self._agreement.decision.incarnation}"
        self._keep(progress.epoch, name, self.write_checkpoint if self._world.rank == 0 else None)

    def write_checkpoint(self, folder: Path) -> None:
        """Everything to go on from, into a folder: on rank 0, between two steps."""
        content = {
            "progress": self._loop.progress.to_json(),
            "loop": self._loop.state_dict(),
            **self._order,
            "manager": self._agreement.state,
            "best": self._best,
            "validation": self._validation,
        }
        self._parts.state.save(folder, content)
