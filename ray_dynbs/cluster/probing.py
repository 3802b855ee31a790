"""A probe of a configuration on the workers it would train on: what fits, how fast it is, how noisy."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import ray.train.torch
from ray.train import RunConfig
from ray.train.torch import TorchTrainer

from ray_dynbs.cluster.data import Blocks, PreparedData
from ray_dynbs.cluster.setup import Parts, build_parts, open_stores
from ray_dynbs.cluster.trainer import scaling_config
from ray_dynbs.config import Config
from ray_dynbs.core.estimators import Estimate, NoiseScale
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.core.probed import ProbeResult
from ray_dynbs.training.reports import Progress
from ray_dynbs.training.step import OptimizerStep
from ray_dynbs.training.world import World

NOISE_STEPS = 40
"""Steps over which the noise scale is measured."""


@dataclass(frozen=True)
class ProbeInput:
    """What the driver hands to every worker."""

    config: Config
    blocks: dict[str, Blocks]


@dataclass(frozen=True)
class ProbeReport:
    """What a probe found.

    Attributes:
        result: Sizes tried.
        noise_scale: Over the first steps, rows; ``None`` where nothing could be compared.
        world_size: Workers.
        device: What they compute on.
    """

    result: ProbeResult
    noise_scale: Estimate | None
    world_size: int
    device: str


def run_probe(config: Config, data: PreparedData) -> ProbeReport:
    """Probe on the connected cluster, with the workers of a run.

    Args:
        config: The run's configuration.
        data: Its rows.

    Raises:
        ConfigError: the cluster cannot place the workers.
        ray.train.TrainingFailedError: a worker failed; where no row fits, with a ``ConfigError``.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            probe_worker,  # type: ignore[arg-type]  # typed as returning nothing; the value is handed on
            train_loop_config={"input": ProbeInput(config, data.blocks)},
            scaling_config=scaling_config(config),
            run_config=RunConfig(name="probe", storage_path=folder),
        )
        result: Any = trainer.fit()
    report: ProbeReport = result.return_value
    return report


def probe_worker(loop_config: dict[str, Any]) -> ProbeReport:
    """The train loop of a probe."""
    given: ProbeInput = loop_config["input"]
    world = World.current(ray.train.torch.get_device())
    parts = build_parts(given.config, world, open_stores(given.config, given.blocks))
    step = parts.make_step()
    result = parts.probe_memory(step)
    return ProbeReport(result, _noise_scale(parts, step, result), world.size, str(world.device))


def _noise_scale(parts: Parts, step: OptimizerStep, result: ProbeResult) -> Estimate | None:
    """Of the first steps of a run at its initial batch; the weights move, and are thrown away.

    ``None`` where it is lost in noise, or the run diverges within these steps.
    """
    noise = parts.config.noise.model_copy(update={"measure_every": 1, "lone": "split"})
    config, world = parts.config.model_copy(update={"noise": noise}), parts.world
    parts = replace(parts, config=config)
    initial = min(config.batch.initial, parts.feed.num_rows)
    parts.feed.set_plan(BatchPlan.fit(initial, world.size, result.largest))
    loop = parts.make_loop(step, Progress())
    parts.state.model.train()
    try:
        for batch in itertools.islice(loop.batches(), NOISE_STEPS):
            loop.step(batch, parts.loss)
    except FloatingPointError:  # on all ranks alike; sizes are known all the same
        return None
    pieces = loop.report_interval().totals.pieces
    scale = NoiseScale()
    return scale.estimates(scale.update(scale.init(), pieces)).get("noise_scale")
