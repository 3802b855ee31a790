"""The smallest batch that covers all classes with a given probability.

Draws with class probabilities p_i. Exact by inclusion and exclusion over the classes,
``P = sum over subsets A of (-1)^|A| (1 - p_A)^b``, or for many classes by the convolution of the
classes' exponential generating functions; the union bound ``sum_i (1 - p_i)^b <= 1 - q`` is cheap,
sufficient, and close at high q.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ray_dynbs.core.errors import ConfigError

LARGEST_BATCH = 1_000_000
LARGEST_EXACT = 100_000_000
"""Classes times draws squared above which the exact answer takes too long."""
UNION_IS_EXACT = 1e-8
"""Doubt below which the union bound is exact but for rounding, and the exact sum is not."""
Curve = npt.NDArray[np.float64]
FEW_CLASSES = 12


def coverage(probabilities: Sequence[float], batch_size: int) -> float:
    """Probability that independent draws show every class, in [0, 1].

    Args:
        probabilities: Of the classes, each > 0, summing to 1.
        batch_size: Draws.
    """
    return float(coverages(probabilities, batch_size)[batch_size])


def coverages(probabilities: Sequence[float], most: int) -> Curve:
    """The same for every number of draws from 0 to ``most``: float64 [most + 1]."""
    few = len(probabilities) <= FEW_CLASSES
    curve = (_inclusion_exclusion if few else _convolution)(probabilities, most)
    curve[: len(probabilities)] = 0.0
    return np.clip(curve, 0.0, 1.0)


def _inclusion_exclusion(probabilities: Sequence[float], most: int) -> Curve:
    missing, signs = np.zeros(1), np.ones(1)
    for p in probabilities:
        missing, signs = np.concatenate([missing, missing + p]), np.concatenate([signs, -signs])
    left, power, curve = np.clip(1.0 - missing, 0.0, 1.0), np.ones(len(missing)), np.empty(most + 1)
    for draws in range(most + 1):
        curve[draws] = signs @ power
        power *= left
    return curve


def _convolution(probabilities: Sequence[float], most: int) -> Curve:
    """Class by class: among the draws not taken by earlier classes, at least one is of this class.

    ``P_k(m) = sum_{j >= 1} C(m, j) s^j (1 - s)^(m - j) P_(k-1)(m - j)``, with s the class's share among
    the classes up to it.
    """
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])
    covered = np.ones(most + 1)
    covered[0] = 0.0  # one class: covered by any draw at all
    so_far = probabilities[0]
    for p in probabilities[1:]:
        so_far += p
        log_share, log_rest = math.log(p / so_far), math.log1p(-p / so_far)
        before, covered = covered, np.zeros(most + 1)
        for draws in range(1, most + 1):
            j = np.arange(1, draws + 1)
            log_binomial = log_factorial[draws] - log_factorial[j] - log_factorial[draws - j]
            covered[draws] = np.exp(log_binomial + j * log_share + (draws - j) * log_rest) @ before[draws - j]
    return covered


def smallest_covering_batch(probabilities: Sequence[float], quantile: float, *, exact: bool = True) -> int:
    """The fewest draws that show every class with probability at least ``quantile``.

    Args:
        probabilities: Weights of the classes, each > 0; normalised here.
        quantile: ``q``, in (0, 1).
        exact: Exactly; else by the union bound, which is never smaller.

    Raises:
        ConfigError: no class, a weight not above 0, a quantile out of range, no such batch below a million,
            or an exact answer that would take too long.

    >>> [smallest_covering_batch([0.9, 0.1], q) for q in (0.5, 0.9, 0.95, 0.99)]
    [7, 22, 29, 44]
    >>> smallest_covering_batch([1] * 10, 0.5), smallest_covering_batch([1] * 10, 0.5, exact=False)
    (27, 29)
    """
    return _smallest(tuple(probabilities), quantile, exact)


@functools.lru_cache(maxsize=128)  # a manager is built for every decision
def _smallest(probabilities: tuple[float, ...], quantile: float, exact: bool) -> int:
    total = sum(probabilities)
    if not probabilities or not all(p > 0 and math.isfinite(p) for p in probabilities):
        raise ConfigError(f"class weights are {list(probabilities)[:10]}; allowed: at least one, each > 0")
    if not 0 < quantile < 1:
        raise ConfigError(f"quantile is {quantile}; allowed: > 0 and < 1")
    shares = [p / total for p in probabilities]

    def union(batch_size: int) -> bool:
        return float(np.sum((1.0 - np.array(shares)) ** batch_size)) <= 1 - quantile

    if len(shares) == 1:
        return 1
    bound = _first(union, 1, LARGEST_BATCH)
    if not exact or 1 - quantile < UNION_IS_EXACT:
        return bound
    if len(shares) > FEW_CLASSES and len(shares) * bound**2 > LARGEST_EXACT:
        raise ConfigError(
            f"the exact batch for {len(shares)} classes (at most {bound}) takes too long to find; allowed: "
            "exact: false"
        )
    enough = coverages(shares, bound) >= quantile
    return int(np.argmax(enough)) if enough.any() else bound


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest number in [low, high] for which something monotone holds.

    Raises:
        ConfigError: it does not hold at ``high``.
    """
    if not holds(high):
        raise ConfigError(f"no batch of up to {high:,} rows covers all classes; leave out the rarest")
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
