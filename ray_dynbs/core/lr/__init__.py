"""LR-scaling rules by name, warm-up, and the progress of a per-step schedule."""

from ray_dynbs.core.lr.progress import GainProgress, ScheduleProgress
from ray_dynbs.core.lr.rules import ADAM_FAMILY, LR_RULES, LRRule, Noise, NoScaling
from ray_dynbs.core.lr.scaling import Adjustment, Scaling
from ray_dynbs.core.lr.warmup import ramped_scale, warmed_scale

__all__ = [
    "ADAM_FAMILY",
    "LR_RULES",
    "Adjustment",
    "GainProgress",
    "LRRule",
    "NoScaling",
    "Noise",
    "Scaling",
    "ScheduleProgress",
    "ramped_scale",
    "warmed_scale",
]
