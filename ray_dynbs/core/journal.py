"""The decision journal: one JSON line per decision, and its replay through a fresh manager.

The journal is written elsewhere; here is only what a line means. Lines of work lost to a roll-back
stay in the file, told apart by their incarnation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ray_dynbs.core.decision import Decision
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.manager import DynamicBatchSizeManager


def encode_line(decision: Decision) -> str:
    """One line of ``decisions.jsonl`` without the newline; strict JSON, floats exact."""
    return json.dumps(decision.to_record(), allow_nan=False)


def decode_lines(text: str, where: str = "journal") -> list[Decision]:
    """All decisions of a journal.

    Args:
        text: Its lines.
        where: What to call it in a complaint.

    Raises:
        ConfigError: a line that is no decision; names its number.
    """
    decisions = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            decisions.append(Decision.from_record(json.loads(line)))
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"{where} line {number} is not a decision: {error!r}") from error
    return decisions


@dataclass(frozen=True)
class Mismatch:
    """A line whose replay came out differently."""

    recorded: Decision
    replayed: Decision


def replay(
    decisions: Iterable[Decision],
    make_manager: Callable[[], DynamicBatchSizeManager],
    earlier: Mapping[int, Callable[[], DynamicBatchSizeManager]] | None = None,
) -> list[Mismatch]:
    """Feed the recorded signals back and compare every decision, bit for bit.

    A (re)start goes back to the state that the run had at the restored version, in whichever
    incarnation that was last reached.

    Args:
        decisions: The journal, in file order.
        make_manager: Builds the manager from the run's configuration.
        earlier: The same from configurations that were replaced, by the first incarnation that they no
            longer held for.

    Returns:
        The lines that differ; empty when the journal reproduces.

    Raises:
        ConfigError: a restart from a version the journal does not have.
    """
    builders = sorted((earlier or {}).items())
    states: dict[int, dict[str, Any]] = {}
    mismatches = []
    for recorded in decisions:
        build = next((b for until, b in builders if recorded.incarnation < until), make_manager)
        if not states:
            manager = build()
            states[0] = manager.state_dict()
        if recorded.signal is None:
            if recorded.version not in states:
                raise ConfigError(
                    f"restart from version {recorded.version}; the journal has {sorted(states)}"
                )
            manager = build()
            manager.load_state_dict(states[recorded.version])
            again = manager.start(
                world_size=recorded.plan.world_size,
                incarnation=recorded.incarnation,
                num_rows=recorded.num_rows,
                micro_ceiling=recorded.micro_ceiling,
            )
        else:
            again = manager.decide(recorded.signal)
        states[again.version] = manager.state_dict()
        if again != recorded:
            mismatches.append(Mismatch(recorded, again))
    return mismatches


def would_have(
    decisions: Iterable[Decision], make_manager: Callable[[], DynamicBatchSizeManager]
) -> list[tuple[Decision, Decision]]:
    """What another manager would have decided on the recorded signals.

    The signals were measured under the recorded sizes, so this is a first look, not a prediction.

    Args:
        decisions: The journal, in file order; of work that was repeated the last counts.
        make_manager: Builds the other manager.

    Returns:
        Recorded and other decision, for every one made from a signal.
    """
    manager = make_manager()
    last = {(d.version, d.signal is None): d for d in decisions}
    pairs = []
    for recorded in sorted(last.values(), key=lambda d: (d.version, d.incarnation)):
        if recorded.signal is None:
            manager.start(
                world_size=recorded.plan.world_size,
                num_rows=recorded.num_rows,
                micro_ceiling=recorded.micro_ceiling,
            )
            continue
        stale = recorded.signal.plan_version != recorded.version - 1
        signal = replace(recorded.signal, plan_version=-1 if stale else manager.version)
        pairs.append((recorded, manager.decide(signal)))
        manager.limit_micro_batch(recorded.micro_ceiling)  # what did not fit then would not have fitted
    return pairs
