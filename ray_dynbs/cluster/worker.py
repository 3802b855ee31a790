"""What runs in every Ray Train worker: set up, then epoch by epoch train, evaluate, decide, save."""

from __future__ import annotations

import io
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

from ray_dynbs.cluster.coordinator import DecisionRequest, EpochRecord, Reply
from ray_dynbs.cluster.data import Blocks, fetch
from ray_dynbs.config import Config
from ray_dynbs.core.decision import Decision
from ray_dynbs.core.lr import ScheduleProgress
from ray_dynbs.core.signal import Signal
from ray_dynbs.storage.run_directory import MODEL, RunDirectory
from ray_dynbs.tasks.loading import load_task
from ray_dynbs.training.checkpoint import TrainState, seed_everything
from ray_dynbs.training.columns import ColumnStore
from ray_dynbs.training.evaluate import evaluate
from ray_dynbs.training.feed import IndexedFeed, sequential_batches
from ray_dynbs.training.loop import EpochReport, Progress, TrainingLoop
from ray_dynbs.training.lr import Schedule
from ray_dynbs.training.optimizers import build_optimizer, build_scheduler
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.step import OptimizerStep
from ray_dynbs.training.world import World

logger = logging.getLogger(__name__)
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
        self._precision = MixedPrecision(self._config.precision, self._world.device)
        self._task = load_task(self._config.task)
        self._unsent: list[EpochRecord] = []
        self._best: float | None = None
        self._state: dict[str, Any] | None = None
        self._build()
        self._restore()

    def train(self) -> dict[str, Any]:
        """All epochs that are left."""
        while self._loop.progress.epoch < self._config.epochs:
            report = self._loop.train_epoch()
            validation = self._evaluate()
            self._schedule.after_epoch(validation.get("loss", report.totals.loss))
            self._keep_best(validation)
            self._decide(report, validation)
            self._save()
        return {"best": self._best, "epochs": self._loop.progress.epoch}

    # -- set-up --------------------------------------------------------------------------------

    def _build(self) -> None:
        config, world, blocks = self._config, self._world, self._given.blocks
        dtype = self._precision.weight_dtype
        floats = torch.float64 if config.precision == "fp64" else None
        stores = {
            split: ColumnStore(fetch(data), config.data.columns, floats) for split, data in blocks.items()
        }
        self._validation = stores.get("validation")
        seed_everything(config.seed, 0, 0)
        self._model = self._task.build_model(config).to(device=world.device, dtype=dtype)
        progress = ScheduleProgress(stores["train"].num_rows, config.reference_batch_size)
        self._optimizer = self._build_optimizer()
        self._schedule = Schedule(
            self._build_scheduler(progress), progress, per_epoch=config.scheduler.unit == "epoch"
        )
        self._saved = TrainState(self._model, self._optimizer, self._schedule, self._precision)
        self._feed = IndexedFeed(
            stores["train"],
            rank=world.rank,
            plan=config.make_manager(world.size).plan,
            seed=config.seed,
            shuffle=config.data.shuffle,
            device=world.device,
        )

    def _build_optimizer(self) -> torch.optim.Optimizer:
        build = getattr(self._task, "build_optimizer", None)
        if build is not None:
            optimizer: torch.optim.Optimizer = build(self._config, self._model)
            return optimizer
        section = self._config.optimizer
        return build_optimizer(section.name, self._model.parameters(), section.arguments)

    def _build_scheduler(self, progress: ScheduleProgress) -> Any:
        section, epochs = self._config.scheduler, self._config.epochs
        planned = epochs * (progress.steps_per_epoch if section.unit == "step" else 1)
        build = getattr(self._task, "build_scheduler", None)
        if build is not None:
            return build(self._config, self._optimizer, planned)
        return build_scheduler(section.name, self._optimizer, section.arguments, planned)

    def _restore(self) -> None:
        """From the newest checkpoint if there is one; then tell the coordinator that we begin."""
        saved = ray.train.get_checkpoint()
        progress = Progress()
        if saved is not None:
            with saved.as_directory() as folder:
                restored = self._saved.load(Path(folder), self._world.device)
            progress = Progress(**restored["progress"])
            self._best, self._state = restored["best"], restored["manager"]
        step = OptimizerStep(
            self._model,
            self._optimizer,
            self._world,
            self._precision,
            clip_grad_norm=self._config.clip_grad_norm,
        )
        self._loop = TrainingLoop(
            model=self._model,
            optimizer=self._optimizer,
            step=step,
            schedule=self._schedule,
            feed=self._feed,
            loss_fn=lambda batch: self._task.loss(self._model, batch),
            world=self._world,
            seed=self._config.seed,
            warmup_epochs=self._config.lr.warmup_epochs,
            progress=progress,
        )
        reply = self._ask("start", ray.get_runtime_context().get_worker_id(), self._world.size, self._state)
        if reply is None:
            raise RuntimeError(f"the coordinator did not answer within {COORDINATOR_TIMEOUT_S:g} s")
        self._agree(reply)

    # -- every epoch ---------------------------------------------------------------------------

    def _evaluate(self) -> dict[str, float]:
        """Loss and metrics over the validation rows; empty without any."""
        if self._validation is None:
            return {}
        metrics = getattr(self._task, "metrics", None)
        batches = sequential_batches(
            self._validation,
            rank=self._world.rank,
            world_size=self._world.size,
            batch_size=self._config.evaluate.batch_size or 2 * self._plan.micro_batch_size,
            device=self._world.device,
        )
        return evaluate(
            self._model,
            batches,
            lambda batch: self._task.loss(self._model, batch),
            (lambda batch: metrics(self._model, batch)) if metrics else None,
            world=self._world,
            precision=self._precision,
        )

    def _keep_best(self, validation: dict[str, float]) -> None:
        """Write ``model.pt`` where the metric is the best so far (without validation: always)."""
        metric = self._config.metric
        if validation and metric.name not in validation:
            raise ValueError(
                f"metric.name is {metric.name!r}; the task reports {', '.join(sorted(validation))}"
            )
        value = validation.get(metric.name)
        if value is not None:
            better = self._best is None or (
                value > self._best if metric.mode == "max" else value < self._best
            )
            if not better:
                return
            self._best = value
        if self._world.rank == 0:
            buffer = io.BytesIO()
            torch.save(self._model.state_dict(), buffer)
            self._given.run.write_bytes(MODEL, buffer.getvalue())

    def _decide(self, report: EpochReport, validation: dict[str, float]) -> None:
        """Rank 0 asks once; all ranks apply the answer, or all keep the plan they have."""
        reply = None
        if self._world.rank == 0:
            self._unsent.append(EpochRecord(self._epoch_row(report, validation)))
            signal = self._signal(report, validation)
            reply = self._call("decide", DecisionRequest(self._state or {}, signal, tuple(self._unsent)))
            if reply is not None:
                self._unsent.clear()
        reply = self._world.broadcast_object(reply)
        if reply is not None:
            self._agree(reply)

    def _agree(self, reply: Reply) -> None:
        self._state = reply.state
        self._plan, self._incarnation = reply.decision.plan, reply.decision.incarnation
        self._apply(reply.decision)

    def _apply(self, decision: Decision) -> None:
        self._loop.apply(decision)

    def _save(self) -> None:
        """Report a checkpoint to Ray Train: a barrier that every rank passes equally often."""
        progress = self._loop.progress
        name = f"epoch-{progress.epoch:05d}-incarnation-{self._incarnation}"
        if self._world.rank != 0:
            ray.train.report({"epoch": progress.epoch}, checkpoint_dir_name=name)
            return
        with tempfile.TemporaryDirectory() as folder:
            self._saved.save(
                Path(folder),
                {"progress": progress.to_json(), "manager": self._state, "best": self._best},
            )
            saved = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": progress.epoch}, checkpoint=saved, checkpoint_dir_name=name)

    # -- the coordinator -----------------------------------------------------------------------

    def _ask(self, method: str, *args: Any) -> Reply | None:
        """A call by rank 0 whose reply every rank receives."""
        reply = self._call(method, *args) if self._world.rank == 0 else None
        answer: Reply | None = self._world.broadcast_object(reply)
        return answer

    def _call(self, method: str, *args: Any) -> Reply | None:
        try:
            call = getattr(self._given.coordinator, method).remote(*args)
            reply: Reply = ray.get(call, timeout=COORDINATOR_TIMEOUT_S)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            logger.warning("the coordinator did not answer (%s); the plan stays as it is", error)
            return None
        return reply

    def _signal(self, report: EpochReport, validation: dict[str, float]) -> Signal:
        progress, totals = self._loop.progress, report.totals
        return Signal.measured(
            epoch=report.epoch,
            epochs_seen=float(progress.epoch),
            step=progress.step,
            samples_seen=progress.samples_seen,
            plan_version=report.plan_version,
            world_size=self._world.size,
            num_steps=totals.num_steps,
            num_finite_steps=totals.num_finite_steps,
            rows=report.rows,
            grad_norm=totals.grad_norm,
            train_loss=totals.loss,
            val_loss=validation.get("loss"),
            val_metric=validation.get(self._config.metric.name),
            memory_fraction=report.memory_fraction,
            step_time_s=report.epoch_time_s / max(report.steps, 1),
        )

    def _epoch_row(self, report: EpochReport, validation: dict[str, float]) -> dict[str, Any]:
        plan, totals = self._plan, report.totals
        return {
            "epoch": report.epoch,
            "incarnation": self._incarnation,
            "global_batch_size": plan.global_batch_size,
            "micro_batch_size": plan.micro_batch_size,
            "grad_accum_steps": plan.grad_accum_steps,
            "world_size": plan.world_size,
            "steps": report.steps,
            "rows": report.rows,
            "lr": report.lr,
            "lr_scale": report.lr_scale,
            "train_loss": totals.loss,
            "val_loss": validation.get("loss"),
            "val_metric": validation.get(self._config.metric.name),
            "grad_norm": totals.grad_norm,
            "noise_scale": None,
            "memory_fraction": report.memory_fraction,
            "samples_per_s": report.rows / report.epoch_time_s,
            "epoch_time_s": report.epoch_time_s,
        }
