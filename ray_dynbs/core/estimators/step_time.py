"""Step time as a function of micro-batch, accumulation and ranks (Pollux, OSDI 2021, eq. 8 to 11)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Annotated

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.keys import Key, check_ranges

GAMMA_RANGE = (1.0, 10.0)
PLAUSIBLE_S = (1e-9, 1e9)
"""Step times that are taken for measurements."""


@dataclass(frozen=True)
class Observation:
    """The time of steps of one kind.

    Attributes:
        ranks: Data-parallel ranks, at least 1.
        micro: Rows in one forward/backward on one rank, at least 1.
        extra: Accumulation steps beyond the first.
        seconds: Mean time of a step, > 0.
        nodes: Machines the ranks are spread over.
    """

    ranks: int
    micro: int
    extra: int
    seconds: float
    nodes: int = 1


@dataclass(frozen=True, kw_only=True)
class StepTimeModel:
    """``T = s T_grad + (T_grad^gamma + T_sync^gamma)^(1/gamma)``, times in seconds.

    ``T_grad = alpha_c + beta_c m``; ``T_sync`` is 0 on one rank, ``alpha_r + beta_r (R - 2)`` on one node,
    ``alpha_n + beta_n (R - 2)`` across nodes. Gamma is 1 where computing and synchronising follow each
    other, and large where they overlap.

    Raises:
        ConfigError: a number out of range.
    """

    alpha_c: Annotated[float, Key("fixed time of a forward and backward", ge=0, le=1e9)]
    beta_c: Annotated[float, Key("time per row", ge=0, le=1e9)]
    alpha_r: Annotated[float, Key("synchronising two ranks of a node", ge=0, le=1e9)] = 0.0
    beta_r: Annotated[float, Key("the same, per rank more", ge=0, le=1e9)] = 0.0
    alpha_n: Annotated[float, Key("synchronising two ranks across nodes", ge=0, le=1e9)] = 0.0
    beta_n: Annotated[float, Key("the same, per rank more", ge=0, le=1e9)] = 0.0
    gamma: Annotated[float, Key("how far computing hides synchronising", ge=1, le=10)] = 1.0

    def __post_init__(self) -> None:
        check_ranges(self)

    def seconds(self, ranks: int, micro: int, extra: int = 0, nodes: int = 1) -> float:
        """Time of a step.

        >>> model = StepTimeModel(alpha_c=0.02, beta_c=0.001, alpha_r=0.01, beta_r=0.002, gamma=1.6)
        >>> round(model.seconds(4, 64), 7)
        0.0869551
        """
        grad = self.alpha_c + self.beta_c * micro
        sync = 0.0
        if ranks > 1:
            alpha, beta = (self.alpha_r, self.beta_r) if nodes == 1 else (self.alpha_n, self.beta_n)
            sync = alpha + beta * (ranks - 2)
        if sync == 0:
            return (extra + 1) * grad
        larger = max(grad, sync)  # taken out, so that no power overflows
        both = ((grad / larger) ** self.gamma + (sync / larger) ** self.gamma) ** (1 / self.gamma)
        return float(extra * grad + larger * both)


def efficiency(batch_size: float, noise_scale: float, reference_batch_size: float) -> float:
    """Progress per row over that at the reference batch (eq. 4): ``(phi + B0) / (phi + B)``.

    >>> [round(efficiency(batch, 1000, 128), 7) for batch in (128, 256, 8192)]
    [1.0, 0.8980892, 0.1227154]
    """
    return (noise_scale + reference_batch_size) / (noise_scale + batch_size)


def best_batch_of_a_line(noise_scale: float, alpha: float, beta: float) -> float:
    """The batch of highest goodput where a step takes ``alpha + beta B``: ``sqrt(phi alpha / beta)``."""
    return math.sqrt(noise_scale * alpha / beta)


def fit_step_time(seen: Sequence[Observation]) -> StepTimeModel:
    """Least squares on the log of the times, with bounds, of the terms that were seen at work.

    Without several ranks there is no synchronisation, without several numbers of ranks none that grows
    with them, without several nodes none between nodes.

    Raises:
        ConfigError: fewer than two kinds of steps, which leave fixed and growing time untold apart.
    """
    from scipy.optimize import least_squares  # slow to import

    kinds = {(each.ranks, each.micro, each.extra, each.nodes) for each in seen}
    if len(kinds) < 2:
        raise ConfigError(f"step times of {len(kinds)} kind of step; allowed: at least 2")
    names = ["alpha_c", "beta_c", *_sync_terms(seen)]
    fastest = min(each.seconds for each in seen)  # the unit of time of the fit
    start = [0.5, 0.5 / max(each.micro for each in seen)] + [0.1] * (len(names) - 2)
    low, high = [1e-15] * len(names), [math.inf] * len(names)
    if "gamma" in names:
        place = names.index("gamma")
        low[place], high[place], start[place] = *GAMMA_RANGE, 1.5

    def residuals(values: Sequence[float]) -> list[float]:
        model = StepTimeModel(**dict(zip(names, map(float, values), strict=True)))
        times = [model.seconds(e.ranks, e.micro, e.extra, e.nodes) for e in seen]
        return [math.log(time / (e.seconds / fastest)) for time, e in zip(times, seen, strict=True)]

    found = least_squares(residuals, start, bounds=(low, high), x_scale=start).x
    values = {
        name: float(x) * (1 if name == "gamma" else fastest) for name, x in zip(names, found, strict=True)
    }
    return StepTimeModel(**values)


def _sync_terms(seen: Sequence[Observation]) -> list[str]:
    names: list[str] = []
    for nodes, letter in ((False, "r"), (True, "n")):
        ranks = {each.ranks for each in seen if each.ranks > 1 and (each.nodes > 1) is nodes}
        names += [f"alpha_{letter}"] if ranks else []
        names += [f"beta_{letter}"] if len(ranks) > 1 else []
    # How far computing hides synchronising shows only against steps that synchronise nothing.
    alone = any(each.ranks == 1 or each.extra for each in seen)
    return [*names, "gamma"] if names and alone and len(seen) > len(names) + 2 else names


def as_rows(seen: Sequence[Observation]) -> list[list[float]]:
    """JSON-able."""
    return [list(astuple(each)) for each in seen]


def from_rows(rows: Sequence[Sequence[float]]) -> list[Observation]:
    """The inverse of :func:`as_rows`."""
    return [
        Observation(int(ranks), int(micro), int(extra), float(seconds), int(nodes))
        for ranks, micro, extra, seconds, nodes in rows
    ]
