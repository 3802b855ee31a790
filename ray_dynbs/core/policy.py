"""The policy protocol: a pure pair of functions, composed by :func:`chain`.

A policy (or guard: the shape is the same) turns a proposal into a proposal::

    state = policy.init(plan)
    proposal, state = policy.update(proposal, state, view)

The idea is that of optax's gradient transformations: state goes in and comes out, nothing is kept
on the object, so a decision can be replayed from its inputs. The first piece of a chain receives
"as it is", a policy moves it, guards behind it hold or limit the move.

To add one: write a function that returns an object with ``init`` and ``update`` and name its import
path in the configuration (``policy: {name: my_package.my_policy, ...its keys}``).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ray_dynbs.core.estimators import Estimates
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.core.signal import Signal

State = Any
"""A policy's memory between decisions: anything JSON can hold, ``None`` where there is none."""


@dataclass(frozen=True)
class Proposal:
    """What the pieces of a chain have agreed on so far.

    Attributes:
        global_batch_size: Proposed rows per optimizer step.
        micro_ceiling: Proposed most rows in one forward/backward; ``None``: the whole share.
        reasons: One phrase per piece that had a say, in order.
    """

    global_batch_size: int
    micro_ceiling: int | None = None
    reasons: tuple[str, ...] = ()

    def because(self, reason: str, **changes: Any) -> Proposal:
        """This proposal with changes and one more reason."""
        return replace(self, reasons=(*self.reasons, reason), **changes)


@dataclass(frozen=True)
class View:
    """What a policy may look at.

    Attributes:
        signal: The latest measurements.
        plan: The plan actually in use (not what was last proposed: a veto changes nothing).
        decisions_since_change: Decisions made since the global batch last changed, this one not
            counted; ``None`` while it never has.
        steps_since_change: Optimizer steps since then (since the start while it never has).
        estimates: What is estimated from all signals so far, each with its relative error.
        num_rows: Rows in one pass, ``None`` where unknown.
        reference_batch_size: The batch the base LR was tuned for, ``None`` where unknown.
        micro_ceiling: Most rows known to fit in one forward/backward, ``None`` where no limit is known.
        bounds: Smallest and largest global batch there may be, ``None`` where unknown.
    """

    signal: Signal
    plan: BatchPlan
    decisions_since_change: int | None = None
    steps_since_change: int = 0
    estimates: Estimates = field(default_factory=Estimates)
    num_rows: int | None = None
    reference_batch_size: int | None = None
    micro_ceiling: int | None = None
    bounds: tuple[int, int] | None = None


class Policy(Protocol):
    """A pure pair; see the module docstring. Implementations hold parameters only."""

    def init(self, plan: BatchPlan) -> State:
        """The state before the first decision."""

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """The next proposal and state; reads no clock, draws no random number, does no I/O."""


@dataclass(frozen=True)
class Chain:
    """Several pieces applied in order; its state is the list of theirs."""

    pieces: tuple[Policy, ...]

    def init(self, plan: BatchPlan) -> State:
        """The initial states of all pieces."""
        return [piece.init(plan) for piece in self.pieces]

    def update(self, proposal: Proposal, state: State, view: View) -> tuple[Proposal, State]:
        """Pass the proposal through every piece."""
        states = []
        for piece, piece_state in zip(self.pieces, state, strict=True):
            proposed, new_state = piece.update(proposal, piece_state, view)
            proposal = _sane(proposed, proposal, piece)
            states.append(new_state)
        return proposal, states


def _sane(proposed: Proposal, before: Proposal, piece: Policy) -> Proposal:
    """What a piece proposed, with plain whole numbers; its move is dropped where they are none."""
    sizes = proposed.global_batch_size, proposed.micro_ceiling
    if (
        type(sizes[0]) is int
        and sizes[0] >= 1
        and (sizes[1] is None or (type(sizes[1]) is int and sizes[1] >= 1))
    ):
        return proposed
    try:
        whole = [None if size is None else operator.index(size) for size in sizes]
        if (
            any(isinstance(size, bool) or (size is not None and size < 1) for size in sizes)
            or whole[0] is None
        ):
            raise TypeError
    except TypeError:
        found = f"{type(piece).__name__} proposed {sizes[0]!r} rows, {sizes[1]!r} at a time"
        return before.because(f"{found}: not whole numbers of at least 1, hold")
    return replace(proposed, global_batch_size=whole[0], micro_ceiling=whole[1])


def chain(*pieces: Policy) -> Chain:
    """Compose a policy and its guards: each receives what the one before it proposed."""
    return Chain(pieces)


class Stateless:
    """Base for pieces that remember nothing."""

    def init(self, plan: BatchPlan) -> State:
        """No state."""
        return None
