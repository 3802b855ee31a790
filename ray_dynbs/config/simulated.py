"""A configuration in the simulator."""

from __future__ import annotations

from ray_dynbs.config.schema import Config
from ray_dynbs.core.simulator import SimulatedEpoch, World, simulate


def simulated(config: Config, world: World, seed: int = 0) -> list[SimulatedEpoch]:
    """What every epoch of a configuration would come to, with as many workers as it allows.

    Args:
        config: The configuration.
        world: What it meets.
        seed: Of the measurements' noise.
    """
    return simulate(
        config.make_manager,
        world,
        epochs=config.epochs,
        world_size=config.cluster.worker_range[1],
        reference_batch_size=config.reference_batch_size,
        cadence=config.batch.cadence,
        measured_alone=config.lone != "none",
        seed=seed,
    )
