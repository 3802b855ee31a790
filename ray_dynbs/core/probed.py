"""What a probe of memory has found: sizes tried, the largest that fits, the fastest, the line behind them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

KNEE = 0.95
"""Fraction of the best speed from which on a size counts as being as fast."""
FASTER = 1.1
"""How much faster a smaller size has to be, to be taken in place of a larger one that fits.

Timings scatter from run to run, and the micro-batch must not: a difference as large as this does not."""
Limit = Literal["memory", "time"]


@dataclass(frozen=True)
class SizeTried:
    """One size, as it went.

    Attributes:
        micro_batch_size: Rows in one forward/backward.
        fraction: Peak over what may be used, on the fullest rank; ``None`` where a rank ran out of memory.
        samples_per_s: Rows per second of one rank, the slowest; ``None`` where a rank ran out of memory.
        peak_bytes: Of the fullest memory, with all that others hold of it; ``None`` likewise.
        failed: It failed by something else than memory.
    """

    micro_batch_size: int
    fraction: float | None
    samples_per_s: float | None
    peak_bytes: float | None = None
    failed: bool = False

    @property
    def fits(self) -> bool:
        """Whether it leaves the head-room free."""
        return self.fraction is not None and self.fraction <= 1


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        largest: Most rows that fit, 1 or more, run for real.
        fastest: Of the sizes that fit the largest one, or a smaller one that is surely faster.
        tried: All sizes, in the order tried.
        most: Largest size that was allowed.
        limit: What keeps :attr:`largest` below :attr:`most`: memory, or the time that a larger one would take
            to be tried; ``None``: nothing does.
        usable_bytes: Of the fullest memory, what may be used.
        doubts: What could not be measured as it should.
        headroom: Why more is left free than was asked for; empty where that is not so.
    """

    largest: int
    fastest: int
    tried: tuple[SizeTried, ...]
    most: int
    limit: Limit | None
    usable_bytes: float = math.nan
    doubts: tuple[str, ...] = ()
    headroom: str = ""

    @property
    def ceiling(self) -> int | None:
        """Most rows in one forward/backward from now on; ``None`` where all that is allowed may be taken."""
        return None if self.limit is None and self.fastest == self.most else self.fastest

    @property
    def fitting(self) -> list[SizeTried]:
        """The sizes that fit, the smallest first."""
        fit = [each for each in self.tried if each.fits and each.micro_batch_size <= self.largest]
        return sorted(fit, key=lambda each: each.micro_batch_size)

    @property
    def knee(self) -> int:
        """The smallest size that fits whose speed is within 5 % of the best."""
        best = max(each.samples_per_s or 0.0 for each in self.fitting)
        return next(t.micro_batch_size for t in self.fitting if (t.samples_per_s or 0.0) >= KNEE * best)

    @property
    def line(self) -> tuple[float, float] | None:
        """Bytes at no rows, and per row: the least squares line through the peaks; ``None`` without two."""
        known = {t.micro_batch_size: t.peak_bytes for t in self.tried if t.peak_bytes is not None}
        if len(known) < 2:
            return None
        slope, base = statistics.linear_regression(list(known), list(known.values()))
        return base, slope

    def notes(self) -> list[str]:
        """One phrase for everything that a run has to say of it."""
        said = []
        if self.limit == "memory":
            said.append(
                f"memory: {self.largest} rows fit in one forward, of {self.most} allowed "
                f"({len(self.tried)} sizes tried)" + (f"; {self.headroom}" if self.headroom else "")
            )
        elif self.limit == "time":
            said.append(
                f"memory: {self.largest} rows fit in one forward; more, of {self.most} allowed, would have "
                "taken too long to try"
            )
        if self.fastest < self.largest:
            speed = {each.micro_batch_size: each.samples_per_s or math.nan for each in self.tried}
            said.append(
                f"speed: micro-batches of {self.fastest} rows, {speed[self.fastest]:,.0f} rows/s and worker, "
                f"are faster than {self.largest}, {speed[self.largest]:,.0f}"
            )
        return [*said, *(f"memory: {doubt}" for doubt in self.doubts)]


def faster_sizes(tried: Sequence[SizeTried], largest: int) -> list[int]:
    """Sizes of at most half the largest that seem to be surely faster, to be timed again, in this order.

    A size close by would be faster by chance. The fastest ones come first, and of those that are as fast
    the larger one.
    """
    speeds = {t.micro_batch_size: t.samples_per_s for t in tried if t.fits and t.samples_per_s is not None}
    enough = FASTER * speeds.get(largest, math.inf)
    seem = [rows for rows, speed in speeds.items() if rows <= largest // 2 and speed >= enough]
    best = max((speeds[rows] for rows in seem), default=0.0)
    return sorted(seem, key=lambda rows: (speeds[rows] < KNEE * best, -rows))
