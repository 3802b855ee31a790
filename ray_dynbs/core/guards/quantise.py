"""``quantise``: only certain sizes, so that compiled models and kernels meet few shapes."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Annotated

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.keys import Key, check_ranges
from ray_dynbs.core.policy import Proposal, State, Stateless, View


@dataclass(frozen=True, kw_only=True)
class Quantise(Stateless):
    """Round a move down to a size that is allowed; a move that comes to nothing by it is dropped.

    Raises:
        ConfigError: none or several of the three ways, or buckets out of order.
    """

    multiple_of: Annotated[int | None, Key("multiples of this", ge=1)] = None
    powers_of_two: Annotated[bool, Key("1, 2, 4, 8, ...")] = False
    buckets: Annotated[list[int] | None, Key("these sizes, in order")] = None

    def __post_init__(self) -> None:
        check_ranges(self)
        chosen = [self.multiple_of is not None, self.powers_of_two, self.buckets is not None]
        if sum(chosen) != 1:
            raise ConfigError("quantise: allowed: exactly one of multiple_of, powers_of_two, buckets")
        if self.buckets is not None and (
            not self.buckets or min(self.buckets) < 1 or sorted(set(self.buckets)) != self.buckets
        ):
            raise ConfigError(f"quantise: buckets is {self.buckets}; allowed: sizes of at least 1, in order")

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """The largest allowed size that is not larger than the proposal; the batch in use needs none."""
        size, wanted = view.plan.global_batch_size, proposal.global_batch_size
        if wanted == size:
            return proposal, state
        allowed = self.within(wanted, *(view.bounds or (1, max(wanted, size)))) or size
        if (allowed - size) * (wanted - size) < 0:
            allowed = size
        if allowed == wanted:
            return proposal, state
        return proposal.because(f"quantise: {wanted} -> {allowed}", global_batch_size=allowed), state

    def within(self, size: int, smallest: int, largest: int) -> int | None:
        """The largest allowed size of at most ``size``, else the smallest one, within bounds; or ``None``."""
        found = self._floor(min(size, largest))
        if found is None or found < smallest:
            found = self._next(smallest)
        return found if found is not None and smallest <= found <= largest else None

    def _floor(self, size: int) -> int | None:
        """The largest allowed size of at most ``size``."""
        if self.buckets is not None:
            place = bisect.bisect_right(self.buckets, size)
            return self.buckets[place - 1] if place else None
        if self.powers_of_two:
            return 1 << (size.bit_length() - 1)
        step = self.multiple_of or 1
        return size // step * step or None

    def _next(self, size: int) -> int | None:
        """The smallest allowed size of at least ``size``."""
        if self.buckets is not None:
            place = bisect.bisect_left(self.buckets, size)
            return self.buckets[place] if place < len(self.buckets) else None
        if self.powers_of_two:
            return 1 << (size - 1).bit_length()
        step = self.multiple_of or 1
        return -(-size // step) * step
