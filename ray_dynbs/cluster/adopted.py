"""Ray Train's TorchTrainer with dynamic batches in it: the driver's part of an adopted train loop."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import ray
from pydantic import ValidationError
from ray.data.dataset import MaterializedDataset
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME

from ray_dynbs.cluster.classes import with_class_counts
from ray_dynbs.cluster.coordinator import start_coordinator
from ray_dynbs.cluster.data import Blocks, prepare_data
from ray_dynbs.cluster.follower import Follower, OnEpoch
from ray_dynbs.cluster.run import LoopInput, in_run
from ray_dynbs.cluster.session import DRIVER_SETTINGS
from ray_dynbs.config.errors import explain
from ray_dynbs.config.load import dump_yaml
from ray_dynbs.config.schema import LoopSettings
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.storage.run_directory import CONFIG, RunDirectory

RECORD = "ray_dynbs"
"""Folder of the run's record, inside Ray Train's own folder of the run."""


class AdoptedTrainer(TorchTrainer):
    """Runs a train loop that takes its batches and steps from :func:`ray_dynbs.prepare`.

    Args:
        train_loop_per_worker: The loop, as Ray Train takes it.
        dynbs: How the batch size is decided: the keys of
            :class:`~ray_dynbs.config.schema.LoopSettings`, a subset of a configuration's.
        datasets: As Ray Train takes them. ``train`` is materialised here and handed out in batches of the
            decided size; the others reach the loop as usual, by ``get_dataset_shard``.
        **ray_arguments: Everything else that Ray Train's TorchTrainer takes.

    Raises:
        ConfigError: a key of ``dynbs`` is unknown or its value not allowed, or the storage is a file system
            object.
    """

    def __init__(
        self,
        train_loop_per_worker: Any,
        *,
        dynbs: Mapping[str, Any] | LoopSettings | None = None,
        datasets: Mapping[str, Any] | None = None,
        **ray_arguments: Any,
    ) -> None:
        self.settings = _settings(dynbs)
        super().__init__(train_loop_per_worker, datasets=dict(datasets or {}), **ray_arguments)
        if self.run_config.storage_filesystem is not None:
            raise ConfigError("RunConfig.storage_filesystem is set; allowed: storage_path as a path or URI")
        self.on_epoch: OnEpoch | None = None

    @property
    def record(self) -> RunDirectory:
        """The run directory: decisions, epochs, report."""
        config = self.run_config
        return RunDirectory(f"{str(config.storage_path).rstrip('/')}/{config.name}/{RECORD}")

    def fit(self) -> Any:
        """Train; what Ray Train's ``fit`` returns and raises.

        Raises:
            ConfigError: training rows that cannot become tensors, or workers that would starve another data
                set's pipeline.
        """
        for key, value in DRIVER_SETTINGS.items():
            os.environ.setdefault(key, value)
        given_data = self.datasets
        self.datasets = {name: each() if callable(each) else each for name, each in given_data.items()}
        others = {name: each for name, each in self.datasets.items() if name != "train"}
        self._refuse_to_starve(others)
        blocks = self._train_blocks()
        settings = with_class_counts(self.settings, blocks)
        record = self._new_record()
        record.write_text(CONFIG, dump_yaml(settings, name=str(self.run_config.name)))
        coordinator = start_coordinator(settings, record, str(self.run_config.name))
        given = LoopInput(settings, blocks, coordinator)
        loop: Any = getattr(self, "train_loop_per_worker")  # noqa: B009
        self.train_loop_per_worker, self.datasets = _around(loop, given), others
        try:
            with Follower(coordinator, self.on_epoch):
                return super().fit()
        finally:
            ray.kill(coordinator)
            self.train_loop_per_worker, self.datasets = loop, given_data

    def _new_record(self) -> RunDirectory:
        """The run directory, empty unless Ray Train goes on with a run that it finds there."""
        record = RunDirectory(self.record.absolute_uri)
        ray_run = RunDirectory(record.absolute_uri.rpartition("/")[0])
        if record.exists(CONFIG) and not ray_run.exists(CHECKPOINT_MANAGER_SNAPSHOT_FILENAME):
            record.remove()
        record.make()
        return record

    def _train_blocks(self) -> Blocks | None:
        train = self.datasets.get("train")
        if train is None:
            return None
        columns, timeout_s = self.settings.columns, self.settings.timeout_s
        self._data = prepare_data({"train": train}, columns, timeout_s=timeout_s)  # which owns the blocks
        return self._data.blocks["train"]

    def _refuse_to_starve(self, others: Mapping[str, Any]) -> None:
        """See that a pipeline that runs beside the workers finds a CPU: without one it waits for ever.

        Raises:
            ConfigError: the workers take them all.
        """
        lazy = [name for name, each in others.items() if not isinstance(each, MaterializedDataset)]
        scaling: Any = self.scaling_config
        workers = max(scaling.num_workers) if isinstance(scaling.num_workers, tuple) else scaling.num_workers
        each = (scaling.resources_per_worker or {}).get("CPU", 0.0 if scaling.use_gpu else 1.0)
        cpus = ray.cluster_resources().get("CPU", 0.0) if lazy else 0.0
        if lazy and workers * each > cpus - 1 and not self.settings.wait:
            raise ConfigError(
                f"datasets[{lazy[0]!r}] is read while training, but {workers} workers x {each:g} CPU "
                f"leave {max(cpus - workers * each, 0):g} of the cluster's {cpus:g} CPU for it; allowed: at "
                "least 1 left, a smaller resources_per_worker={'CPU': ...}, the data set's materialize(), or "
                "dynbs={'wait': True} where the cluster grows"
            )


def _settings(given: Mapping[str, Any] | LoopSettings | None) -> LoopSettings:
    if isinstance(given, LoopSettings):
        return given
    try:
        return LoopSettings.model_validate(dict(given or {}))
    except ValidationError as error:
        raise ConfigError(explain(error, where="dynbs", model=LoopSettings)) from error


def _around(loop: Any, given: LoopInput) -> Any:
    """The loop with a run around it, of the same signature, which Ray Train looks at."""

    @functools.wraps(loop)
    def with_run(*config: Any) -> Any:
        return in_run(given, functools.partial(loop, *config))

    return with_run
