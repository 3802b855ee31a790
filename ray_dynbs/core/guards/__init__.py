"""The guards, by the name a configuration uses. A guard holds or limits a move of the global batch."""

from ray_dynbs.core.guards.clamp import Clamp
from ray_dynbs.core.guards.class_coverage import ClassCoverage
from ray_dynbs.core.guards.cooldown import Cooldown
from ray_dynbs.core.guards.data_ceiling import DataCeiling
from ray_dynbs.core.guards.dead_band import DeadBand
from ray_dynbs.core.guards.growth_limit import GrowthLimit
from ray_dynbs.core.guards.quantise import Quantise
from ray_dynbs.core.guards.warmup_hold import WarmupHold

GUARDS = {
    "clamp": Clamp,
    "class_coverage": ClassCoverage,
    "cooldown": Cooldown,
    "data_ceiling": DataCeiling,
    "dead_band": DeadBand,
    "growth_limit": GrowthLimit,
    "quantise": Quantise,
    "warmup_hold": WarmupHold,
}

__all__ = [
    "GUARDS",
    "Clamp",
    "ClassCoverage",
    "Cooldown",
    "DataCeiling",
    "DeadBand",
    "GrowthLimit",
    "Quantise",
    "WarmupHold",
]
