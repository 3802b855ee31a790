"""Which micro-batch sizes to try, to find the largest one that fits in memory.

The peak of memory is close to ``a + c m`` in the micro-batch m, with a slope that may change once (another
algorithm of a library, a buffer that grows). Every size that is returned has been run; only where to look
next is extrapolated.

Where running out raises an error, the search may go beyond the limit. Where it ends the process (the host's
memory: the kernel kills, or Ray does), it comes from below, and never goes where twice the slope, or a peak
that grows with the square of the rows, would end it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from ray_dynbs.core.errors import ConfigError

TOLERANCE = 0.03
"""How far below the true maximum an answer may lie, as a fraction of it."""
MOST_TRIES = 8
"""Sizes after which the best one so far is taken."""
_MOST_TRIES_FROM_BELOW, _LARGEST_STRIDE = 24, 8
"""Where running out ends the process: sizes, and how many times the last one the next may be."""
_FAR_OFF, _MOST_TRIES_FAR_OFF = 0.9, 12
"""Where the answer so far is less than this fraction of what failed, the search goes on for so many sizes."""
_STEP_BACK = 0.985
"""Where a line says that a size failed by less, so much of it is tried: allocators take memory in blocks."""
_BEND = 2.0
"""By what factor the slope may change."""
_STRAIGHT = 1.05
"""Slopes that differ by less are one."""
_MISSES = 4
"""Predictions in a row that ran out of memory, after which there is less memory than is said."""
_MOST_TRIES_BLIND, _BLIND_TOLERANCE, _BLIND_HEADROOM = 16, 0.1, 0.1
_CAREFUL, _NEAR = 0.3, 0.6
"""After a surprise: how far to go between a safe size and one that failed, and from where on to do so."""


@dataclass
class MicroBatchSearch:
    """A search over sizes, told what each one took.

    Attributes:
        start: First size to try, rows.
        most: Largest size allowed, which is itself tried before it is returned.
        target_bytes: Largest peak that counts as fitting: the capacity less head-room.
        least: Smallest size that can be run at all.
        ends_at_bytes: Peak at which the process would be ended; ``None`` where an error is raised instead.
        peaks: Size -> peak in bytes; ``None`` where it ran out of memory. In the order tried.
    """

    start: int
    most: int
    target_bytes: float
    least: int = 1
    ends_at_bytes: float | None = None
    peaks: dict[int, float | None] = field(default_factory=dict)
    _rest: float = 0.0
    _surprised: bool = False
    _misses: int = 0
    _settled: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.least <= min(self.start, self.most):
            raise ConfigError(
                f"a search from {self.start} rows between {self.least} and {self.most}; allowed: at least 1, "
                "in this order"
            )

    @property
    def is_limited(self) -> bool:
        """Whether memory sets a limit: it was run into, or is known to lie below :attr:`most`."""
        return self.best is None or self.best < self.most or bool(self._failing)

    @property
    def best(self) -> int | None:
        """The largest size that was run and fits; ``None`` if none did.

        Where the limit is one that nobody can read, so that no head-room was left, a tenth less.
        """
        return max((rows for rows in self._fitting if rows <= (self._settled or rows)), default=None)

    def record(self, rows: int, peak_bytes: float | None, rest_bytes: float = 0.0) -> None:
        """What a size took.

        Args:
            rows: The size.
            peak_bytes: Its peak; ``None`` (or no finite number) where it ran out of memory.
            rest_bytes: What a step without any rows would take.
        """
        self._rest = rest_bytes
        # With two sizes that fit, a failure was no guess but a prediction: the slope changes below it.
        if peak_bytes is not None and not math.isfinite(peak_bytes):
            peak_bytes = None
        missed = peak_bytes is None and len(self._fitting) > 1
        self._surprised |= missed
        if not self._is_blind:
            self._misses = self._misses + 1 if missed else 0
        self.peaks[rows] = peak_bytes

    def propose(self) -> int | None:
        """The next size to try; ``None`` where :attr:`best` is the answer."""
        if not self.peaks:
            return min(self.start if self.ends_at_bytes is None else self.least, self.most)
        fitting, failing = self._fitting, self._failing
        low, upper = max(fitting, default=self.least - 1), min(failing, default=self.most + 1) - 1
        if low >= upper or (fitting and len(self.peaks) >= self._most_tries):
            return self._settle(low)
        if not fitting:
            return self.least  # smaller by far than what failed: from there the slope is known soon
        if self._is_blind:
            rows = self._middle(low, upper + 1) or self._settle(low)
        else:
            rows = self._second(low, upper) if len(fitting) == 1 else self._next(low, upper)
            rows = self._within_reach(rows, low)
        rows = None if rows is None else min(rows, upper)
        return None if rows in self.peaks else rows

    def _within_reach(self, rows: int | None, low: int) -> int | None:
        """No further than twice the slope so far may go without ending the process; ``None`` for no step."""
        if rows is None or self.ends_at_bytes is None or self._failing:
            return rows
        taken, left = max(self._peak(low) - self._rest, 0.0), self.ends_at_bytes - self._peak(low)
        slope = taken / low
        if len(self._fitting) > 1:
            slope = max(slope, self._slope(self._fitting[-2], low))
        straight = int(low + left / (slope * _BEND)) if slope > 0 else 2 * low
        squared = int(low * math.sqrt(1 + left / taken)) if taken > 0 else _LARGEST_STRIDE * low
        far = min(squared, straight, _LARGEST_STRIDE * low)
        return min(rows, far) if far > low else None

    @property
    def _most_tries(self) -> int:
        fitting, failing = self._fitting, self._failing
        if self._is_blind:
            return _MOST_TRIES_BLIND
        if self.ends_at_bytes is not None:
            return _MOST_TRIES_FROM_BELOW
        far_off = bool(failing) and max(fitting, default=0) < _FAR_OFF * failing[0]
        return _MOST_TRIES_FAR_OFF if far_off else MOST_TRIES

    @property
    def _is_blind(self) -> bool:
        """Whether memory ends before what is said of it: a limit that nobody can read.

        Where predictions fail again and again, or a size that would fit even at the steepest slope.
        """
        fitting, failing = self._fitting, self._failing
        if self._misses >= _MISSES:
            return True
        if len(fitting) < 2 or not failing or self.peaks[failing[0]] is not None:
            return False
        slope, low = self._slope(fitting[-2], fitting[-1]), fitting[-1]
        room = self.target_bytes - self._peak(low)
        return low + room / max(slope * _BEND, 1e-300) >= failing[0]

    def _settle(self, low: int) -> int | None:
        """Of a limit that nobody can read, a last size with head-room; ``None`` once that was tried."""
        if not self._is_blind or self._settled is not None:
            return None
        self._settled = max(int((1 - _BLIND_HEADROOM) * low), self.least)
        return None if self._settled in self.peaks else self._settled

    @staticmethod
    def _middle(low: int, high: int) -> int | None:
        if high <= (1 + _BLIND_TOLERANCE) * low:
            return None
        return max(low + 1, math.isqrt(low * high) if high > 2 * low else (low + high) // 2)

    @property
    def _fitting(self) -> list[int]:
        return sorted(m for m, peak in self.peaks.items() if peak is not None and peak <= self.target_bytes)

    @property
    def _failing(self) -> list[int]:
        return sorted(m for m, peak in self.peaks.items() if peak is None or peak > self.target_bytes)

    def _peak(self, rows: int) -> float:
        return self.peaks[rows] or 0.0

    def _slope(self, a: int, b: int) -> float:
        return (self._peak(b) - self._peak(a)) / (b - a)

    def _second(self, low: int, upper: int) -> int | None:
        """With one size that fits: where a second point makes a line."""
        failing = self._failing
        if failing and self.peaks[failing[0]] is not None:
            return self._from_above() or self._between(low, failing[0])
        if failing:
            return low + 1 if low == self.least else max(low // 2, self.least)
        # A peak that began at zero would have the steepest slope: that far it fits in any case.
        return min(max(int(low * self.target_bytes / max(self._peak(low), 1e-9)), 2 * low), upper)

    def _next(self, low: int, upper: int) -> int | None:
        before = self._fitting[-2]
        slope, room = self._slope(before, low), self.target_bytes - self._peak(low)
        if slope <= 0:
            return self._within(8 * low, low, upper + 1, 0.0) if self._failing else 8 * low
        steepest, flattest = slope * _BEND, slope if self._bend_is_behind else slope / _BEND
        if low + room / flattest <= (1 + TOLERANCE) * low:
            return None
        rows = int(low + room / slope)
        failing = self._failing
        if failing:
            if upper + 1 <= (1 + TOLERANCE) * low:
                return None
            rows = self._within(rows, low, failing[0], room / steepest)
        if rows <= low:  # one more may fit, if the slope is about to fall
            return low + 1 if room >= flattest else None
        return rows

    def _within(self, rows: int, low: int, high: int, safe: float) -> int:
        """A size between one that fits and one that fails, given what the slope below predicts."""
        if self.peaks[high] is not None:
            rows = rows if rows < high else self._from_above() or self._between(low, high)
            return max(min(rows, int(_STEP_BACK * high)), min(low + 1, high - 1))
        if rows < high and not (self._surprised and rows > low + _NEAR * (high - low)):
            return rows
        return int(low + safe + _CAREFUL * max(high - 1 - low - safe, 0.0))

    def _between(self, low: int, high: int) -> int:
        """Where the line between two known peaks meets the target."""
        return int(low + (self.target_bytes - self._peak(low)) / self._slope(low, high))

    def _from_above(self) -> int | None:
        """Where the line through two peaks above the target meets it; ``None`` without such a place."""
        known = [rows for rows in self._failing if self.peaks[rows] is not None]
        if len(known) < 2 or known[0] != self._failing[0] or self._slope(*known[:2]) <= 0:
            return None
        rows = math.floor(
            known[0] - (self._peak(known[0]) - self.target_bytes) / self._slope(known[0], known[1])
        )
        return rows if max(self._fitting, default=0) < rows < known[0] else None

    @property
    def _bend_is_behind(self) -> bool:
        """Whether the slope has changed already, below the last interval: it changes no more."""
        known = sorted(rows for rows, peak in self.peaks.items() if peak is not None)
        slopes = [self._slope(a, b) for a, b in pairwise(known)][:-1]
        slopes = [slope for slope in slopes if slope > 0]
        return len(slopes) > 1 and max(slopes) > _STRAIGHT * min(slopes)
