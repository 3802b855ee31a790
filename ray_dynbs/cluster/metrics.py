"""A run's numbers as Ray's own metrics, which every node of a cluster offers to Prometheus.

They are set in the coordinator's process alone, so a run has one series of each. Ray puts ``ray_`` before
the names and ``_total`` behind a counter's. What reaches Prometheus is what Ray's agent was told in the last
report (every 10 s unless ``RAY_metrics_report_interval_ms`` says otherwise); without an agent nothing is.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray.util.metrics import Counter, Gauge

from ray_dynbs.core.decision import Decision
from ray_dynbs.storage.tables import EPOCH_SCHEMA

REFRESH_S = 0.5
"""Ray reports a gauge once each time it is set, at most once a second, and forgets it after two reports."""

_EPOCH = {name: f"{name} of the last finished epoch, as in epochs.parquet" for name in EPOCH_SCHEMA.names}
_NEXT = {
    "next_global_batch_size": "rows per optimizer step, from the last decision on",
    "next_micro_batch_size": "most rows in one forward/backward on one rank, from the last decision on",
    "next_grad_accum_steps": "micro-batches per step on the busiest rank, from the last decision on",
    "next_world_size": "data-parallel ranks, from the last decision on",
    "next_lr_scale": "multiplier on the base LR before warm-up, from the last decision on",
}
_GAUGES = _EPOCH | _NEXT
# No name of a counter may be a gauge's: Ray would take the count for the gauge's value.
_COUNTED = {
    "epochs": "epochs finished",
    "trained_steps": "optimizer steps of finished epochs",
    "trained_rows": "rows of finished epochs",
    "restarts": "starts of the workers beyond the run's first",
}

_log = logging.getLogger(__name__)


class RunMetrics:
    """The gauges and counters of one run; nothing that fails in them reaches the caller.

    A gauge without a finite number disappears until it has one again: Ray's exporter lets no NaN through.

    Args:
        run: The run's name, the tag ``run`` of every metric.
    """

    def __init__(self, run: str) -> None:
        self._tags = {"run": run.encode("ascii", "backslashreplace").decode()}  # Ray takes no other text
        self._lock = threading.Lock()
        self._shown: dict[str, float] = {}
        self._failed = False
        self._gauges: dict[str, Any] = {}
        self._counters: dict[str, Any] = {}
        with self._harmless():
            self._gauges |= {name: Gauge(f"dynbs_{name}", said, ("run",)) for name, said in _GAUGES.items()}
            self._counters |= {
                name: Counter(f"dynbs_{name}", said, ("run",)) for name, said in _COUNTED.items()
            }
            self._counters["decisions"] = Counter("dynbs_decisions", "decisions made", ("run", "outcome"))

    def decided(self, decision: Decision, size_before: int | None, *, counts: bool) -> None:
        """A plan is in force from now on.

        Args:
            decision: Which one.
            size_before: The global batch before it; ``None`` at a start.
            counts: Whether this is the first time it is told.
        """
        plan = decision.plan
        with self._harmless():
            self._show(
                {
                    "next_global_batch_size": plan.global_batch_size,
                    "next_micro_batch_size": plan.micro_batch_size,
                    "next_grad_accum_steps": plan.grad_accum_steps,
                    "next_world_size": plan.world_size,
                    "next_lr_scale": decision.lr_scale,
                }
            )
            if not counts:
                return
            if size_before is not None:
                self._count("decisions", 1, outcome=_outcome(size_before, plan.global_batch_size))
            elif decision.incarnation:
                self._count("restarts", 1)

    def finished(self, row: Mapping[str, Any], *, counts: bool) -> None:
        """An epoch has ended.

        Args:
            row: Its row of ``epochs.parquet``.
            counts: Whether this is the first time it is told.
        """
        with self._harmless():
            self._show({name: row.get(name) for name in _EPOCH})
            if counts:
                self._count("epochs", 1)
                self._count("trained_steps", row["steps"])
                self._count("trained_rows", row["rows"])

    def refresh(self) -> None:
        """Set every gauge again to what it shows."""
        with self._harmless():
            for name, value in self._shown.items():
                self._gauges[name].set(value, tags=self._tags)

    def keep_fresh(self) -> None:
        """Refresh from now on, from a thread, as long as the process lives."""

        def refresh_forever() -> None:
            while True:
                time.sleep(REFRESH_S)
                self.refresh()

        with self._harmless():
            threading.Thread(target=refresh_forever, name="ray-dynbs-metrics", daemon=True).start()

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """One thread at a time; a failure is logged once, and ends the gauges until they are set again."""
        with self._lock:
            try:
                yield
            except Exception:  # noqa: BLE001  # metrics fail no run
                if not self._failed:
                    _log.exception("the run's metrics are incomplete")
                self._failed = True
                self._shown.clear()

    def _show(self, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            number = math.nan if value is None else float(value)
            if math.isfinite(number):
                self._shown[name] = number
            elif self._shown.pop(name, None) is None:
                continue
            # Of a number that is none, once is enough: the old value goes, and the exporter warns of each.
            self._gauges[name].set(number, tags=self._tags)

    def _count(self, name: str, number: int | None, **tags: str) -> None:
        if number:  # Ray takes no zero
            self._counters[name].inc(number, tags=self._tags | tags)


def _outcome(before: int, after: int) -> str:
    if before == after:
        return "hold"
    return "grow" if after > before else "shrink"
