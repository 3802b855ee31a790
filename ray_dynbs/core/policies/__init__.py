"""The policies, by the name a configuration uses."""

from ray_dynbs.core.policies.fixed import Fixed
from ray_dynbs.core.policies.goodput import Goodput
from ray_dynbs.core.policies.noise_scale import FollowNoiseScale
from ray_dynbs.core.policies.norm_test import NormTest
from ray_dynbs.core.policies.plateau import Plateau
from ray_dynbs.core.policies.schedule import Schedule
from ray_dynbs.core.policies.threshold import Threshold

POLICIES = {
    "fixed": Fixed,
    "goodput": Goodput,
    "noise_scale": FollowNoiseScale,
    "norm_test": NormTest,
    "plateau": Plateau,
    "schedule": Schedule,
    "threshold": Threshold,
}

__all__ = ["POLICIES", "Fixed", "FollowNoiseScale", "Goodput", "NormTest", "Plateau", "Schedule", "Threshold"]
