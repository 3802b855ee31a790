"""LR-scaling rules by name, warm-up, and the progress of a per-step schedule."""

from ray_dynbs.core.lr.progress import ScheduleProgress
from ray_dynbs.core.lr.rules import LR_RULES, Linear, LRRule, NoScaling, SquareRoot
from ray_dynbs.core.lr.warmup import warmed_scale

__all__ = ["LR_RULES", "LRRule", "Linear", "NoScaling", "ScheduleProgress", "SquareRoot", "warmed_scale"]
