"""The driver of a run: data, coordinator and Ray Train's TorchTrainer, put together from a config."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_dynbs.cluster.coordinator import start_coordinator
from ray_dynbs.cluster.data import PreparedData
from ray_dynbs.cluster.failures import LostWorkersOnly, failure_config
from ray_dynbs.cluster.follower import Follower, OnEpoch
from ray_dynbs.cluster.worker import WorkerInput, train_worker
from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.storage.run_directory import CHECKPOINTS, RunDirectory

CPU_SHARES = (1.0, 0.5, 0.25, 0.125)


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        best: Best value of the metric, ``None`` without validation.
        epochs: Epochs trained, those before a resume included.
    """

    best: float | None
    epochs: int


def run_training(
    config: Config,
    run: RunDirectory,
    data: PreparedData,
    on_epoch: OnEpoch | None = None,
    *,
    loop: Callable[[dict[str, Any]], dict[str, Any]] = train_worker,
) -> RunResult:
    """Train on the connected cluster; goes on from the run's newest checkpoint if it has one.

    Args:
        config: The configuration.
        run: Its directory, which exists.
        data: Its rows.
        on_epoch: Called from another thread for every finished epoch.
        loop: What every worker runs.

    Raises:
        ConfigError: the cluster cannot place the workers.
        ray.train.TrainingFailedError: a worker failed more often than allowed.
    """
    scaling = scaling_config(config)
    fewest, most = config.cluster.worker_range
    if fewest < most and not config.cluster.wait:
        # Workers that do not come back within this time are done without; an autoscaler needs longer.
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")
    run = RunDirectory(run.absolute_uri)  # workers have working directories of their own
    coordinator = start_coordinator(config, run)
    auto = config.cluster.max_failures == "auto"
    trainer = (_Trainer if auto else TorchTrainer)(
        loop,  # type: ignore[arg-type]  # typed as returning nothing; the value is handed on
        train_loop_config={"input": WorkerInput(config, run, data.blocks, coordinator)},
        scaling_config=scaling,
        run_config=RunConfig(
            name=CHECKPOINTS,
            storage_path=run.uri,
            checkpoint_config=CheckpointConfig(num_to_keep=config.checkpoint.num_to_keep),
            failure_config=failure_config(config.cluster.max_failures),
        ),
    )
    try:
        with Follower(coordinator, on_epoch):
            result: Any = trainer.fit()
    finally:
        ray.kill(coordinator)
    outcome = result.return_value
    return RunResult(best=outcome["best"], epochs=outcome["epochs"])


class _Trainer(TorchTrainer):
    """Ray Train's trainer, which starts again only after a worker was lost."""

    def _initialize_and_run_controller(self, **parts: Any) -> Any:
        failure_config: Any = self.run_config.failure_config
        parts["failure_policy"] = LostWorkersOnly(failure_config)
        return super()._initialize_and_run_controller(**parts)  # type: ignore[misc]  # typed as Ray's older one


def crowded(config: Config) -> str:
    """What there is to say where more workers share the connected cluster's CPUs than there are of them."""
    cpus, (fewest, _) = ray.cluster_resources().get("CPU", 0.0), config.cluster.worker_range
    if config.cluster.resources_per_worker is not None or fewest <= cpus:
        return ""
    return f"{fewest} workers share {cpus:g} CPU: each is slower than one with a CPU of its own"


def scaling_config(config: Config) -> ScalingConfig:
    """Workers and their resources on the connected cluster.

    Every worker gets one CPU, or the largest of 1/2, 1/4 and 1/8 with which the fewest workers allowed find
    room: the data is materialised and needs none, so a run fits on one core.

    Raises:
        ConfigError: the cluster has too little for the fewest workers; says what it has.
    """
    cluster, wanted = ray.cluster_resources(), config.cluster
    cpus, gpus = cluster.get("CPU", 0.0), cluster.get("GPU", 0.0)
    fewest, most = wanted.worker_range
    use_gpu = gpus >= fewest if wanted.use_gpu == "auto" else wanted.use_gpu
    share = next((s for s in CPU_SHARES if s * fewest <= cpus), CPU_SHARES[-1])
    resources = wanted.resources_per_worker or {"CPU": share}
    needed = {name: each * fewest for name, each in resources.items()}
    if use_gpu:
        needed.setdefault("GPU", float(fewest))
    who = "they" if fewest == most else f"the {fewest}"
    for name, total in needed.items():
        if total > cluster.get(name, 0.0) and not wanted.wait:
            raise ConfigError(
                f"cluster.num_workers is {wanted.num_workers}: {who} need {total:g} {name}, "
                f"the cluster has {cluster.get(name, 0.0):g}; cluster.wait: true waits for it to grow"
            )
    workers: Any = most if fewest == most else (fewest, most)
    return ScalingConfig(num_workers=workers, use_gpu=use_gpu, resources_per_worker=resources)
