"""How fast something changes per pass: a line through the recent decisions, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ray_dynbs.core.estimators.estimate import Estimate

KEPT = 0.8
"""Weight that a decision's point keeps from one decision to the next: about ten count."""
FEWEST = 3
"""Points below which a line says nothing of its own error."""
Line = list[float]
"""Number of points; weight; means of x and y; weighted sums of squares and of products around them; sum of
squared weights."""


def no_line() -> Line:
    """Nothing seen."""
    return [0.0] * 8


def add_point(line: Sequence[float], x: float, y: float) -> Line:
    """One more point; one at the x of the last counts like any other.

    Sums are kept around the weighted means (West 1979), so that large x and y cost no digits.

    A point whose squares overflow is left out.

    Args:
        line: Of the points before, which lose weight.
        x: Passes so far.
        y: What is followed, finite.
    """
    number, weight, mean_x, mean_y, xx, yy, xy, squares = line
    weight, squares = KEPT * weight + 1.0, KEPT * KEPT * squares + 1.0
    dx, dy = x - mean_x, y - mean_y
    mean_x, mean_y = mean_x + dx / weight, mean_y + dy / weight
    left = 1.0 - 1.0 / weight  # of the new point's deviation, once the mean has moved towards it
    added = [
        number + 1.0,
        weight,
        mean_x,
        mean_y,
        KEPT * xx + dx * dx * left,
        KEPT * yy + dy * dy * left,
        KEPT * xy + dx * dy * left,
        squares,
    ]
    return added if all(map(math.isfinite, added)) else list(line)


def slope(line: Sequence[float]) -> Estimate | None:
    """Change of y per x by weighted least squares; ``None`` where no slope is defined yet.

    The error is that of the usual formula, ``sqrt(RSS / (n - 2) / S_xx)``, with the effective number of
    points ``n`` of their weights.
    """
    number, weight, _, _, xx, yy, xy, squares = line
    if number < 2 or not xx > 0:
        return None
    value = xy / xx
    points = weight * weight / squares
    if number < FEWEST or points <= 2:
        return Estimate(value, math.inf)
    residual = max(yy - value * xy, 0.0) / weight * points / (points - 2)
    error = math.sqrt(residual / (xx / weight) / points)
    if not value:
        return Estimate(0.0, math.inf)
    return Estimate(value, error / abs(value))
