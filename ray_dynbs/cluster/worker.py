"""What runs in every Ray Train worker: epoch by epoch train, evaluate, decide, save."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

from ray_dynbs.cluster.coordinator import DecisionRequest, EpochRecord, Reply
from ray_dynbs.cluster.data import Blocks
from ray_dynbs.cluster.record import make_row, make_signal
from ray_dynbs.cluster.setup import build_parts
from ray_dynbs.config import Config
from ray_dynbs.storage.run_directory import MODEL, RunDirectory
from ray_dynbs.training.loop import EpochReport, Progress
from ray_dynbs.training.world import World

COORDINATOR_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class WorkerInput:
    """What the driver hands to every worker."""

    config: Config
    run: RunDirectory
    blocks: dict[str, Blocks]
    coordinator: Any


def train_worker(loop_config: dict[str, Any]) -> dict[str, Any]:
    """The train loop given to Ray Train; returns the best value of the metric and the epochs done."""
    return Worker(loop_config["input"]).train()


class Worker:
    """One rank of a run.

    Args:
        given: The driver's hand-over.
    """

    def __init__(self, given: WorkerInput) -> None:
        self._given, self._config = given, given.config
        self._world = World.current(ray.train.torch.get_device())
        self._parts = build_parts(given.config, self._world, given.blocks)
        self._best: float | None = None
        self._unsent: list[EpochRecord] = []
        self._notes: list[str] = []
        self._parts.check_metric()
        state = self._restore()
        group, num_rows = ray.get_runtime_context().get_worker_id(), self._parts.feed.num_rows
        reply = self._ask("start", group, self._world.size, num_rows, state)
        if reply is None:
            raise RuntimeError(f"the coordinator did not answer within {COORDINATOR_TIMEOUT_S:g} s")
        self._agree(reply)

    def train(self) -> dict[str, Any]:
        """All epochs that are left."""
        while self._loop.progress.epoch < self._config.epochs:
            self.train_epoch()
        return {"best": self._best, "epochs": self._loop.progress.epoch}

    def train_epoch(self) -> EpochReport:
        """One pass: train, evaluate, decide, save."""
        report = self._loop.train_epoch()
        validation = self._parts.evaluate(self._decision.plan.micro_batch_size)
        self._parts.state.schedule.after_epoch(validation.get("loss", report.totals.loss))
        self._keep_best(validation)
        self._decide(report, validation)
        self._save()
        return report

    def _restore(self) -> dict[str, Any] | None:
        """Go on from the newest checkpoint if there is one; returns its manager state."""
        saved, progress, state = ray.train.get_checkpoint(), Progress(), None
        num_rows = self._parts.feed.num_rows
        if saved is not None:
            with saved.as_directory() as folder:
                restored = self._parts.state.load(Path(folder), self._world.device)
            progress = Progress(**restored["progress"])
            self._best, state = restored["best"], restored["manager"]
            if restored["num_rows"] != num_rows:
                self._notes.append(
                    f"the checkpoint was trained on {restored['num_rows']} rows, there are {num_rows} now: "
                    "the new ones are used, and a per-step schedule goes on from where it was"
                )
        self._loop = self._parts.make_loop(progress)
        return state

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
            self._given.run.write_bytes(MODEL, buffer.getvalue())

    def _decide(self, report: EpochReport, validation: dict[str, float]) -> None:
        """Rank 0 asks once; all ranks apply the answer, or all keep the plan they have."""
        metric = self._config.metric.name
        row = make_row(report, self._decision, validation, metric=metric)
        self._unsent.append(EpochRecord(row, tuple(self._notes)))
        self._notes.clear()
        signal = make_signal(
            report, self._loop.progress, validation, metric=metric, world_size=self._world.size
        )
        reply = self._ask("decide", DecisionRequest(self._manager_state, signal, tuple(self._unsent)))
        if reply is None:
            self._notes.append(
                f"the coordinator did not answer after epoch {report.epoch}: the plan was kept"
            )
        else:
            self._unsent.clear()
            self._agree(reply)

    def _agree(self, reply: Reply) -> None:
        """Take a decision over, on every rank at the same step boundary."""
        self._decision, self._manager_state = reply.decision, reply.state
        self._loop.apply(reply.decision)

    def _save(self) -> None:
        """Report a checkpoint to Ray Train: a barrier that every rank passes equally often."""
        progress = self._loop.progress
        name = f"epoch-{progress.epoch:05d}-incarnation-{self._decision.incarnation}"
        if self._world.rank != 0:
            ray.train.report({"epoch": progress.epoch}, checkpoint_dir_name=name)
            return
        content = {
            "progress": progress.to_json(),
            "num_rows": self._parts.feed.num_rows,
            "manager": self._manager_state,
            "best": self._best,
        }
        with tempfile.TemporaryDirectory() as folder:
            self._parts.state.save(Path(folder), content)
            saved = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": progress.epoch}, checkpoint=saved, checkpoint_dir_name=name)

    def _ask(self, method: str, *args: Any) -> Reply | None:
        """A call that rank 0 makes and whose reply every rank receives; ``None`` without an answer."""
        reply: Reply | None = None
        if self._world.rank == 0:
            call = getattr(self._given.coordinator, method).remote(*args)
            # Silence is said by the caller; a late answer is overwritten by the next one's.
            with contextlib.suppress(ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
                reply = ray.get(call, timeout=COORDINATOR_TIMEOUT_S)
        answer: Reply | None = self._world.broadcast_object(reply)
        return answer
