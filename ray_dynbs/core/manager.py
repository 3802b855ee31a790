"""The brain: turns signals into decisions. Pure, JSON-able, replayable.

The same object serves a plain loop (``update_batch_size`` / ``get_current_batch_size``), the
coordinator actor, the replay of a journal and the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ray_dynbs.core.decision import Decision
from ray_dynbs.core.doubt import leak, unreliable
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators import Estimates, NoiseScale
from ray_dynbs.core.estimators.knowledge import Knowledge
from ray_dynbs.core.guards import Clamp
from ray_dynbs.core.guards.hold import hold
from ray_dynbs.core.lr import LRRule, Noise, NoScaling
from ray_dynbs.core.plan import BatchPlan, tightest
from ray_dynbs.core.policies import Threshold
from ray_dynbs.core.policy import Policy, Proposal, View, chain
from ray_dynbs.core.signal import Signal

KEPT_DECISIONS = 1_000


class DynamicBatchSizeManager:
    """Decides the global batch size, once, for all ranks.

    In a plain loop::

        manager = DynamicBatchSizeManager(initial_batch_size=16)
        for _ in range(num_steps):
            size = manager.get_current_batch_size()
            ...  # train on `size` rows
            manager.update_batch_size(grad_norm, memory_usage)

    By default the policy is ``threshold``, under which memory never changes the global batch; with
    ``policy=Threshold(memory_vote="shrink", memory_grows=True)`` low memory grows it and high memory
    shrinks it.

    Args:
        initial_batch_size: Global batch to begin with, rows.
        max_batch_size: Largest global batch; 512, or ``initial_batch_size`` if that is larger.
        min_batch_size: Smallest global batch; 8, or ``initial_batch_size`` if that is smaller.
        policy: What proposes a size; ``Threshold()`` if left out.
        guards: What may hold or limit a proposal, in order. The bounds are always enforced, last.
        lr_rule: How the LR follows; not at all if left out.
        reference_batch_size: The batch the base LR was tuned for; the initial one if left out.
        max_lr_scale: Cap on the LR multiplier, or ``None``.
        max_micro_batch_size: Most rows in one forward/backward on one rank, or ``None``.
        world_size: Data-parallel ranks.
        num_rows: Rows in one pass, above which no batch grows; in a plain loop also what a pass is counted
            by, for policies and guards that go by passes.
        noise: How the gradient noise scale is smoothed.

    Raises:
        ConfigError: a size below 1, a bound crossed, a cap not above 0.
    """

    def __init__(
        self,
        initial_batch_size: int = 32,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        *,
        policy: Policy | None = None,
        guards: Sequence[Policy] = (),
        lr_rule: LRRule | None = None,
        reference_batch_size: int | None = None,
        max_lr_scale: float | None = None,
        max_micro_batch_size: int | None = None,
        world_size: int = 1,
        num_rows: int | None = None,
        noise: NoiseScale | None = None,
    ) -> None:
        smallest = min(8, initial_batch_size) if min_batch_size is None else min_batch_size
        largest = max(512, initial_batch_size) if max_batch_size is None else max_batch_size
        _check_sizes(initial_batch_size, smallest, largest, reference_batch_size, max_micro_batch_size)
        if max_lr_scale is not None and not max_lr_scale > 0:
            raise ConfigError(f"max_lr_scale is {max_lr_scale}; allowed: > 0")
        self.min_batch_size, self.max_batch_size = smallest, largest
        self._policy = chain(policy or Threshold(), *guards, Clamp(min=smallest, max=largest))
        self._lr_rule = lr_rule or NoScaling()
        self._max_lr_scale = max_lr_scale
        self._reference = reference_batch_size or initial_batch_size
        self._reference_given = reference_batch_size is not None
        self._num_rows = num_rows
        self._max_micro_batch_size = max_micro_batch_size
        self._learned: int | None = None
        self._plan = BatchPlan.fit(initial_batch_size, world_size, self._micro_ceiling)
        self._policy_state = self._policy.init(self._plan)
        self._knowledge = Knowledge(noise or NoiseScale())
        self._known = self._knowledge.init()
        self._incarnation = self._version = 0
        self._epoch = self._step = self._samples_seen = 0
        self._changed_at: tuple[int, int] | None = None
        self._note = ""
        self.decisions: deque[Decision] = deque(maxlen=KEPT_DECISIONS)
        self.batch_size_history: list[int] = []

    # -- the plain-loop API --------------------------------------------------------------------

    def get_current_batch_size(self) -> int:
        """The global batch size in force, rows."""
        return self._plan.global_batch_size

    def update_batch_size(self, grad_norm: float | None, memory_usage: float | None = None) -> int:
        """Decide from one step's gradient norm and memory fraction; returns the size from now on.

        Args:
            grad_norm: L2 norm of the step's mean gradient, before clipping; a number or a tensor of one.
                NaN, inf or ``None`` holds.
            memory_usage: Memory in use over memory there is, in [0, 1], or ``None`` if unknown.
        """
        rows = self._plan.global_batch_size
        memory = None if memory_usage is None else float(memory_usage)
        samples = self._samples_seen + rows
        seen = samples / self._num_rows if self._num_rows else 0.0
        signal = Signal.measured(
            epoch=int(seen),
            epochs_seen=seen,
            step=self._step + 1,
            samples_seen=samples,
            ends_pass=self._num_rows is not None and samples % self._num_rows < rows,
            plan_version=self._version,
            world_size=self._plan.world_size,
            num_steps=1,
            num_finite_steps=1,
            rows=rows,
            grad_norm=None if grad_norm is None else float(grad_norm),
            memory_fraction=memory,
        )
        return self.decide(signal).plan.global_batch_size

    # -- the coordinator's API -----------------------------------------------------------------

    @property
    def plan(self) -> BatchPlan:
        """The plan in force."""
        return self._plan

    @property
    def lr_scale(self) -> float:
        """The multiplier on the base LR in force."""
        return self._scale()[0]

    @property
    def version(self) -> int:
        """Decisions made in the run's history."""
        return self._version

    @property
    def estimates(self) -> Estimates:
        """What is known from all signals so far."""
        return self._knowledge.estimates(self._known)

    def start(
        self,
        *,
        world_size: int,
        incarnation: int = 0,
        num_rows: int | None = None,
        micro_ceiling: int | None = None,
    ) -> Decision:
        """A (re)start: the global batch as it was, cut for the workers there are now.

        Args:
            world_size: Data-parallel ranks.
            incarnation: Restarts of the run so far.
            num_rows: Rows in one pass, if known: a batch of more could not be filled.
            micro_ceiling: Most rows that other incarnations learned to fit; the smallest limit holds.

        Raises:
            ConfigError: ``world_size`` below 1.
        """
        self._incarnation = incarnation
        self._num_rows = num_rows or self._num_rows
        self._learned = tightest(self._learned, micro_ceiling)
        wanted = self._plan.global_batch_size
        smallest, largest = self._bounds
        size = min(max(smallest, wanted), largest)
        reason = f"start with {world_size} ranks"
        if incarnation or self._version:
            reason = f"restart from version {self._version} with {world_size} ranks"
        if size != wanted:
            limits = f"bounds {self.min_batch_size} to {self.max_batch_size}, {num_rows} rows"
            reason += f"; {wanted} -> {size} ({limits})"
        self._plan = BatchPlan.fit(size, world_size, self._micro_ceiling)
        reason, self._note = reason + self._note, ""
        return self._decision((reason,), None)

    def limit_micro_batch(self, rows: int | None) -> None:
        """Take it that no more rows than these fit in one forward/backward; ``None`` says nothing."""
        self._learned = tightest(self._learned, rows)
        plan = self._plan
        self._plan = BatchPlan.fit(plan.global_batch_size, plan.world_size, self._micro_ceiling)

    @property
    def _micro_ceiling(self) -> int | None:
        """The configured limit, and what was learned."""
        return tightest(self._max_micro_batch_size, self._learned)

    def decide(self, signal: Signal) -> Decision:
        """Make one decision; what was measured under another plan, or on next to no rows, holds."""
        self.limit_micro_batch(signal.micro_ceiling)
        proposal = Proposal(self._plan.global_batch_size, self._micro_ceiling)
        if signal.plan_version != self._version:
            reason = f"stale signal (measured under version {signal.plan_version}, now {self._version}): hold"
            proposal = proposal.because(reason)
        elif 0 < signal.rows < self._plan.global_batch_size and signal.rows != self._num_rows:
            size = self._plan.global_batch_size
            proposal = proposal.because(
                f"{signal.rows} rows since the last decision, {size} in a batch: hold"
            )
        else:
            proposal = self._propose(proposal, signal)
        self._epoch, self._step, self._samples_seen = signal.epoch, signal.step, signal.samples_seen
        self._apply(proposal)
        decision = self._decision(proposal.reasons, signal)
        self.decisions.append(decision)
        self.batch_size_history.append(decision.plan.global_batch_size)
        return decision

    def state_dict(self) -> dict[str, Any]:
        """Everything a later process needs to go on exactly: JSON-able, without the history."""
        return {
            "global_batch_size": self._plan.global_batch_size,
            "micro_ceiling": self._learned,
            "world_size": self._plan.world_size,
            "num_rows": self._num_rows,
            "reference_batch_size": self._reference,
            "incarnation": self._incarnation,
            "version": self._version,
            "epoch": self._epoch,
            "step": self._step,
            "samples_seen": self._samples_seen,
            "changed_at": list(self._changed_at) if self._changed_at else None,
            "known": self._known,
            "pieces": self._piece_names,
            "policy_state": self._policy_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; this manager's own bounds, caps and rules apply to it.

        Where the state was saved under another chain of policy and guards, their memory starts anew
        (sizes and counts are kept), and the next :meth:`start` says so.

        Raises:
            ConfigError: the state is not one of :meth:`state_dict`.
        """
        try:
            self._learned = state["micro_ceiling"]
            self._num_rows = state["num_rows"]
            if not self._reference_given:  # "the initial size" means the one the run began with
                self._reference = state["reference_batch_size"]
            saved = state["global_batch_size"]
            size = min(max(saved, self.min_batch_size), self.max_batch_size)
            bounds = f"bounds {self.min_batch_size} to {self.max_batch_size}"
            self._note = "" if size == saved else f"; {saved} -> {size} ({bounds})"
            self._plan = BatchPlan.fit(size, state["world_size"], self._micro_ceiling)
            self._incarnation, self._version = state["incarnation"], state["version"]
            self._epoch, self._step = state["epoch"], state["step"]
            self._samples_seen = state["samples_seen"]
            changed = state["changed_at"]
            self._changed_at = (changed[0], changed[1]) if changed else None
            self._known = self._knowledge.restored(state["known"])
            if self._knowledge.forgets(state["known"]):
                self._note += "; what was known of the noise is dropped (noise.decay is another one)"
            same = state["pieces"] == self._piece_names
            self._policy_state = state["policy_state"] if same else self._policy.init(self._plan)
            self._note += "" if same else "; what the earlier policy and guards remembered is dropped"
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not a manager state: {error!r} in {dict(state)}") from error

    @property
    def _piece_names(self) -> list[str]:
        return [type(piece).__name__ for piece in self._policy.pieces]

    # -- inside --------------------------------------------------------------------------------

    def _propose(self, proposal: Proposal, signal: Signal) -> Proposal:
        self._known = self._knowledge.update(self._known, signal, self._plan.micro_batch_size)
        changed_version, changed_step = self._changed_at or (None, 0)
        view = View(
            signal=signal,
            plan=self._plan,
            decisions_since_change=None if changed_version is None else self._version - changed_version,
            steps_since_change=signal.step - changed_step,
            estimates=(known := self.estimates),
            num_rows=self._num_rows,
            reference_batch_size=self._reference,
            micro_ceiling=self._micro_ceiling,
            bounds=self._bounds,
        )
        proposal, self._policy_state = self._policy.update(proposal, self._policy_state, view)
        if self._num_rows is not None and proposal.global_batch_size > self._num_rows:
            reason = f"{proposal.global_batch_size} -> {self._num_rows} (all the rows there are)"
            proposal = proposal.because(reason, global_batch_size=self._num_rows)
        filling = leak(known.memory_trend)
        if filling:
            proposal = proposal.because(filling)
        doubt = unreliable(signal)
        if doubt and proposal.global_batch_size > self._plan.global_batch_size:
            return hold(proposal, view, f"{doubt}: no growth")
        return proposal

    @property
    def _bounds(self) -> tuple[int, int]:
        """Smallest and largest batch there may be."""
        largest = min(self.max_batch_size, self._num_rows or self.max_batch_size)
        return min(self.min_batch_size, largest), largest

    def _apply(self, proposal: Proposal) -> None:
        self._version += 1
        if proposal.global_batch_size != self._plan.global_batch_size:
            self._changed_at = (self._version, self._step)
        if proposal.micro_ceiling != self._micro_ceiling:
            self._learned = proposal.micro_ceiling
        self._plan = BatchPlan.fit(proposal.global_batch_size, self._plan.world_size, self._micro_ceiling)

    def _scale(self) -> tuple[float, tuple[str, ...]]:
        """The multiplier on the LR, and what there is to say about it."""
        noise, ratio = (
            Noise.of(self.estimates, self._reference),
            self._plan.global_batch_size / self._reference,
        )
        scale = self._lr_rule.scale(ratio, noise)
        said = self._lr_rule.explain(ratio, noise)
        most = self._max_lr_scale
        if most is None or scale <= most:
            return scale, said
        return most, (*said, f"lr_scale {scale:g} -> {most:g} (max_scale)")

    def _decision(self, reasons: tuple[str, ...], signal: Signal | None) -> Decision:
        scale, said = self._scale()
        reasons = (*reasons, *said)
        return Decision(
            incarnation=self._incarnation,
            version=self._version,
            epoch=self._epoch,
            step=self._step,
            samples_seen=self._samples_seen,
            plan=self._plan,
            lr_scale=scale,
            micro_ceiling=self._learned,
            num_rows=self._num_rows,
            reasons=reasons,
            signal=signal,
        )


def _check_sizes(initial: int, smallest: int, largest: int, reference: int | None, micro: int | None) -> None:
    sizes = {"min": smallest, "initial": initial, "max": largest, "reference": reference, "micro": micro}
    for name, size in sizes.items():
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(f"{name} batch size is {size!r}; allowed: a whole number of at least 1")
    if smallest > largest:
        raise ConfigError(f"batch min is {smallest} and max is {largest}; allowed: min at most max")
    if not smallest <= initial <= largest:
        raise ConfigError(f"initial batch size is {initial}; allowed: {smallest} to {largest} (min to max)")
