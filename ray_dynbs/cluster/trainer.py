"""The driver of a run: data, coordinator and Ray Train's TorchTrainer, put together from a config."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_dynbs.cluster.coordinator import EpochRecord, start_coordinator
from ray_dynbs.cluster.data import PreparedData
from ray_dynbs.cluster.worker import WorkerInput, train_worker
from ray_dynbs.config import Config
from ray_dynbs.core.decision import Decision
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.storage.run_directory import CHECKPOINTS, RunDirectory

POLL_S = 0.5
CPU_SHARES = (1.0, 0.5, 0.25, 0.125)
OnEpoch = Callable[[EpochRecord, "Decision | None"], None]


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
    run = RunDirectory(run.absolute_uri)  # workers have working directories of their own
    coordinator = start_coordinator(config, run)
    known = len(ray.get(coordinator.progress.remote(0)))
    trainer = TorchTrainer(
        loop,  # type: ignore[arg-type]  # typed as returning nothing; the value is handed on
        train_loop_config={"input": WorkerInput(config, run, data.blocks, coordinator)},
        scaling_config=scaling,
        run_config=RunConfig(
            name=CHECKPOINTS,
            storage_path=run.uri,
            checkpoint_config=CheckpointConfig(num_to_keep=config.checkpoint.num_to_keep),
            failure_config=FailureConfig(max_failures=config.cluster.max_failures),
        ),
    )
    try:
        with _Follower(coordinator, known, on_epoch):
            result: Any = trainer.fit()
    finally:
        ray.kill(coordinator)
    outcome = result.return_value
    return RunResult(best=outcome["best"], epochs=outcome["epochs"])


def scaling_config(config: Config) -> ScalingConfig:
    """Workers and their resources on the connected cluster.

    Every worker gets one CPU, or the largest of 1/2, 1/4 and 1/8 with which all find room: the data is
    materialised and needs none, so a run fits on one core.

    Raises:
        ConfigError: the cluster has too little for that many workers; says what it has.
    """
    cluster, wanted = ray.cluster_resources(), config.cluster
    cpus, gpus = cluster.get("CPU", 0.0), cluster.get("GPU", 0.0)
    workers = wanted.num_workers
    use_gpu = gpus >= workers if wanted.use_gpu == "auto" else wanted.use_gpu
    share = next((s for s in CPU_SHARES if s * workers <= cpus), CPU_SHARES[-1])
    resources = wanted.resources_per_worker or {"CPU": share}
    needed = {name: each * workers for name, each in resources.items()}
    if use_gpu:
        needed.setdefault("GPU", float(workers))
    for name, total in needed.items():
        if total > cluster.get(name, 0.0):
            raise ConfigError(
                f"cluster.num_workers is {workers}: they need {total:g} {name}, "
                f"the cluster has {cluster.get(name, 0.0):g}"
            )
    return ScalingConfig(num_workers=workers, use_gpu=use_gpu, resources_per_worker=resources)


class _Follower:
    """Polls the coordinator from a thread and reports each finished epoch once."""

    def __init__(self, coordinator: Any, known: int, on_epoch: OnEpoch | None) -> None:
        self._coordinator, self._seen, self._on_epoch = coordinator, known, on_epoch
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ray-dynbs-progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._poll()

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            self._poll()

    def _poll(self) -> None:
        try:
            news = ray.get(self._coordinator.progress.remote(self._seen), timeout=5)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return  # it is restarting, or the run is ending; the record is in the run directory
        for record, decision in news:
            self._seen += 1
            if self._on_epoch is not None:
                self._on_epoch(record, decision)
