"""Moving averages of two noisy, drifting quantities, at several speeds, with their standard errors.

One speed cannot serve: a short memory follows a drift and is noisy, a long one is precise and late.
So several are kept, and each quantity takes the most precise of those that no shorter one contradicts
(after Lepski's rule, as in Goldenshluger and Nemirovski 1997: the intersection of confidence intervals).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Moments = Sequence[float]
"""Means of x, y, x^2, y^2 and x y over some steps."""
Row = list[float]
"""One memory: weight, the five moments times the weight, sum of squared weights."""
AGREEMENT = 3.5
"""Standard errors within which two memories do not contradict each other."""


@dataclass(frozen=True)
class Average:
    """A moving average.

    Attributes:
        value: The average.
        error: Its standard error, from the scatter of the steps and their effective number.
    """

    value: float
    error: float


def empty() -> Row:
    """Nothing averaged."""
    return [0.0] * 7


def add(row: Row, decay: float, moments: Moments, steps: int) -> Row:
    """Average in some steps, among which all count alike.

    Args:
        row: A memory.
        decay: What it keeps from one step to the next, in [0, 1).
        moments: Of those steps.
        steps: How many, at least 1.
    """
    kept = decay**steps
    added = 1.0 - kept
    averaged = [kept * old + added * new for old, new in zip(row[1:6], moments, strict=True)]
    return [kept * row[0] + added, *averaged, kept**2 * row[6] + added**2 / steps]


def averages(row: Row) -> tuple[Average, Average]:
    """Both quantities' de-biased averages; ``row`` holds something."""
    x, y, xx, yy, _ = (value / row[0] for value in row[1:6])
    per_step = row[6] / row[0] ** 2  # one over the effective number of steps
    # With few steps the scatter is underestimated by the factor that Bessel's correction undoes.
    unbiased = per_step / (1.0 - per_step) if per_step < 1 else math.inf
    return (
        Average(x, math.sqrt(max(xx - x * x, 0.0) * unbiased) if unbiased < math.inf else math.inf),
        Average(y, math.sqrt(max(yy - y * y, 0.0) * unbiased) if unbiased < math.inf else math.inf),
    )


def correlation(row: Row) -> float:
    """Of both quantities from step to step, in [-1, 1]; 0 where one does not vary."""
    x, y, xx, yy, xy = (value / row[0] for value in row[1:6])
    scatter = math.sqrt(max(xx - x * x, 0.0) * max(yy - y * y, 0.0))
    return min(max((xy - x * y) / scatter, -1.0), 1.0) if scatter > 0 else 0.0


def most_precise_consistent(candidates: Sequence[Average]) -> Average:
    """Of the averages that no shorter memory contradicts, the one with the smallest error.

    That is the longest of them as long as the scatter stays the same. Where it falls, as a gradient's does
    early in training, a long memory is dominated by old and large values, and no longer precise.

    Args:
        candidates: From short to long memory, at least one.
    """
    low, high = -math.inf, math.inf
    chosen = candidates[0]
    for candidate in candidates:
        reach = AGREEMENT * candidate.error
        low, high = max(low, candidate.value - reach), min(high, candidate.value + reach)
        if low > high:
            break
        if candidate.error <= chosen.error:
            chosen = candidate
    return chosen
