"""The guards, by the name a configuration uses. A guard holds or limits a move of the global batch."""

from ray_dynbs.core.guards.clamp import Clamp
from ray_dynbs.core.guards.cooldown import Cooldown
from ray_dynbs.core.guards.dead_band import DeadBand
from ray_dynbs.core.guards.growth_limit import GrowthLimit
from ray_dynbs.core.guards.warmup_hold import WarmupHold

GUARDS = {
    "clamp": Clamp,
    "cooldown": Cooldown,
    "dead_band": DeadBand,
    "growth_limit": GrowthLimit,
    "warmup_hold": WarmupHold,
}

__all__ = ["GUARDS", "Clamp", "Cooldown", "DeadBand", "GrowthLimit", "WarmupHold"]
