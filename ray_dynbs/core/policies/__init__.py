"""The policies, by the name a configuration uses."""

from ray_dynbs.core.policies.fixed import Fixed
from ray_dynbs.core.policies.threshold import Threshold

POLICIES = {"fixed": Fixed, "threshold": Threshold}

__all__ = ["POLICIES", "Fixed", "Threshold"]
