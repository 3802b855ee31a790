"""How a global batch is cut: into one share per rank, and each share into micro-batches.

Everything is integer arithmetic on row positions, so any size is exact for any number of ranks and
no batch size ever needs rounding. Every rank computes every other rank's share for itself; nothing
has to be communicated to agree on who takes which row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ray_dynbs.core.errors import ConfigError


def rank_share(rows: int, rank: int, world_size: int) -> range:
    """The positions, within a global batch of ``rows`` rows, that one rank takes.

    Shares are contiguous, cover ``[0, rows)`` once and differ by at most one row; the first
    ``rows % world_size`` ranks take the larger ones. A rank's share is empty when there are fewer
    rows than ranks.

    >>> [rank_share(7, rank, 3) for rank in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    base, extra = divmod(rows, world_size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def tightest(*limits: int | None) -> int | None:
    """The smallest of several limits, ``None`` meaning no limit.

    >>> tightest(None, 3, 2), tightest(None)
    (2, None)
    """
    return min((limit for limit in limits if limit is not None), default=None)


def num_steps(rows: int, global_batch_size: int) -> int:
    """Optimizer steps in one pass over ``rows`` rows: the last one takes what is left."""
    return -(-rows // global_batch_size)


@dataclass(frozen=True)
class BatchPlan:
    """One decided size, and how it is worked off.

    Attributes:
        global_batch_size: Rows per optimizer step over all ranks, at least 1.
        micro_batch_size: Most rows in one forward/backward on one rank, at least 1 and at most the
            busiest rank's share.
        world_size: Data-parallel ranks, at least 1.
    """

    global_batch_size: int
    micro_batch_size: int
    world_size: int

    def __post_init__(self) -> None:
        if min(self.global_batch_size, self.micro_batch_size, self.world_size) < 1:
            raise ConfigError(f"{self}: every size must be at least 1")
        if self.micro_batch_size > self.largest_share:
            raise ConfigError(
                f"micro_batch_size is {self.micro_batch_size}; allowed: at most {self.largest_share}, "
                f"the largest share of {self.global_batch_size} rows over {self.world_size} ranks"
            )

    @classmethod
    def fit(cls, global_batch_size: int, world_size: int, micro_ceiling: int | None = None) -> BatchPlan:
        """The plan with the fewest micro-batches: whole shares, or ``micro_ceiling`` rows at a time.

        Raises:
            ConfigError: a size is below 1.
        """
        if min(global_batch_size, world_size) < 1:
            raise ConfigError(
                f"a plan of {global_batch_size} rows on {world_size} ranks: both must be at least 1"
            )
        share = -(-global_batch_size // world_size)
        return cls(
            global_batch_size=global_batch_size,
            micro_batch_size=share if micro_ceiling is None else min(share, micro_ceiling),
            world_size=world_size,
        )

    @property
    def largest_share(self) -> int:
        """Rows of the busiest rank in a full step."""
        return -(-self.global_batch_size // self.world_size)

    @property
    def grad_accum_steps(self) -> int:
        """Micro-batches per optimizer step on the busiest rank, at least 1."""
        return -(-self.largest_share // self.micro_batch_size)

    def step_rows(self, rows_left: int) -> int:
        """Rows of the next step when ``rows_left`` rows of the pass remain."""
        return min(self.global_batch_size, rows_left)

    def micro_batches(self, rows: int, rank: int) -> Iterator[range]:
        """The positions of one rank's micro-batches within a step of ``rows`` rows, in order."""
        share = rank_share(rows, rank, self.world_size)
        for start in range(share.start, share.stop, self.micro_batch_size):
            yield range(start, min(start + self.micro_batch_size, share.stop))
