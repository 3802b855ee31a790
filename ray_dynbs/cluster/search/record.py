"""What became of each trial, and which one is the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray_dynbs.cluster.search.trial import UNREACHED
from ray_dynbs.config.search import Candidates
from ray_dynbs.config.space import Point
from ray_dynbs.storage.search_directory import DECIDED, PARAM, read_results, trial_directory


@dataclass(frozen=True)
class TrialRecord:
    """One trial as it ended.

    Attributes:
        trial: Its id; empty for a candidate that was thrown out before training.
        point: Key -> value.
        status: ``finished``; ``stopped`` early; ``cut`` by the time budget; ``failed``; not trained:
            ``filtered`` by the simulator, or ``unusable``.
        results: What each epoch came to.
        error: Why it failed.
    """

    trial: str
    point: Point
    status: str
    results: tuple[dict[str, Any], ...] = ()
    error: str = ""

    @property
    def last(self) -> dict[str, Any]:
        """What the last epoch came to; empty without one."""
        return self.results[-1] if self.results else {}

    @property
    def cost(self) -> float | None:
        """What reaching the target took; ``None`` without a target, or where it was not reached."""
        cost = self.last.get("cost")
        return cost if cost is not None and cost < UNREACHED else None


def record_of_trial(folder: str, trial_id: str, point: Point, error: str) -> TrialRecord:
    """A trial from its own record."""
    results = read_results(folder, trial_id)
    done = bool(results) and bool(results[-1]["done"])
    decided = trial_directory(folder, trial_id).exists(DECIDED)
    status = "failed" if error else "finished" if done else "stopped" if decided else "cut"
    return TrialRecord(trial_id, dict(point), status, tuple(results), error)


def first_cause(error: BaseException | str | None) -> str:
    """The innermost reason of a trial's error, in one line; empty for none.

    Args:
        error: An exception, perhaps around others, or the text of a traceback, whose last line it is.
    """
    if error is None:
        return ""
    text = str(getattr(error, "cause", None) or getattr(error, "__cause__", None) or error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:500]


def rank(records: Sequence[TrialRecord], candidates: Candidates) -> list[TrialRecord]:
    """Trials that came to something, the best first: complete ones before those stopped early."""
    sign = -1.0 if candidates.base.metric.mode == "max" else 1.0

    def order(record: TrialRecord) -> tuple[float, float, float, str]:
        last = record.last
        cost = last["cost"] if last["cost"] is not None else 0.0
        return cost, sign * last["value"], last["time_s"], record.trial  # alike: the quicker one

    known = [r for r in records if r.results and r.status != "failed" and math.isfinite(r.last["value"])]
    if candidates.search.target is None:
        complete = [r for r in known if r.status == "finished"] or known
        rest = [r for r in known if r not in complete]
        return sorted(complete, key=order) + sorted(rest, key=order)
    return sorted(known, key=order)


def table_row(record: TrialRecord) -> dict[str, Any]:
    """One row of ``trials.parquet``: what it came to, then its point, each key as ``param.<key>``."""
    last = record.last
    return {
        "trial": record.trial,
        "status": record.status,
        "epochs": last.get("epoch", 0),
        "value": last.get("value"),
        "spread": last.get("spread"),
        "values": list(last["values"]) if last else None,
        "cost": record.cost,
        "time_s": last.get("time_s"),
        "samples": last.get("samples"),
        "steps": last.get("steps"),
        "batch_size": last.get("batch_size"),
        "error": record.error or None,
        **{f"{PARAM}{key}": value for key, value in record.point.items()},
    }
