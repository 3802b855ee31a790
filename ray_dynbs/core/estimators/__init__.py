"""What is estimated from signals: each estimator is pure, and says how sure it is."""

from ray_dynbs.core.estimators.estimate import Estimate, Estimates
from ray_dynbs.core.estimators.noise_scale import NoiseScale
from ray_dynbs.core.estimators.pieces import PieceSums, from_pieces, from_two_sizes, trade_off

__all__ = [
    "Estimate",
    "Estimates",
    "NoiseScale",
    "PieceSums",
    "from_pieces",
    "from_two_sizes",
    "trade_off",
]
