"""A run as its report sees it: the epochs that count, the decisions, the restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import yaml

from ray_dynbs.core.decision import Decision
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.storage.run_directory import CONFIG, RunDirectory


@dataclass(frozen=True)
class History:
    """One run.

    Attributes:
        name: Its directory's name; that of Ray Train's run for a loop of the user's own.
        config: The resolved configuration.
        epochs: Rows of ``epochs.parquet`` that count: of each epoch, the last incarnation's.
        decisions: The journal, lost work included.
        num_lost: Epochs trained that a roll-back undid.
        evaluations: Rows of ``evaluations.parquet``, those within epochs, by step.
    """

    name: str
    config: dict[str, Any]
    epochs: tuple[dict[str, Any], ...]
    decisions: tuple[Decision, ...]
    num_lost: int
    evaluations: tuple[dict[str, Any], ...] = ()

    @property
    def metric(self) -> str:
        """Name of the configured metric."""
        return str(self.config["metric"]["name"])

    def column(self, name: str) -> list[float | None]:
        """One quantity over the epochs that count."""
        return [row[name] for row in self.epochs]

    def curve(self, name: str) -> list[tuple[int, float]]:
        """One quantity's finite values over the rows used, those within epochs included."""
        if name == "global_batch_size":
            return [(x, float(y)) for x, y in self.batch_sizes]
        within = [(row["samples_seen"], row.get(name)) for row in self.evaluations]
        points = [*zip(self.samples, self.column(name), strict=True), *within]
        return sorted((x, y) for x, y in points if y is not None and math.isfinite(y))

    @property
    def batch_sizes(self) -> list[tuple[int, int]]:
        """Rows used, and the size trained with up to there: at epochs' ends, and at decisions within them."""
        trained = {s: row["global_batch_size"] for s, row in zip(self.samples, self.epochs, strict=True)}
        kept = {(row["incarnation"], row["epoch"]) for row in self.epochs}
        size = None
        for decision in self.decisions:
            within = decision.signal is not None and (decision.incarnation, decision.epoch) in kept
            if within and size is not None and decision.samples_seen:
                trained.setdefault(decision.samples_seen, size)
            size = decision.plan.global_batch_size
        return sorted(trained.items())

    @property
    def samples(self) -> list[int]:
        """Rows used up to the end of each epoch."""
        total, ends = 0, []
        for row in self.epochs:
            total += row["rows"]
            ends.append(total)
        return ends

    @property
    def starts(self) -> list[Decision]:
        """The (re)starts."""
        return [decision for decision in self.decisions if decision.signal is None]


def read_history(run: RunDirectory) -> History:
    """Read a run directory.

    Raises:
        ConfigError: it is none, or no epoch has been finished.
    """
    if not run.exists(CONFIG):
        raise ConfigError(f"{run.uri}: not a run directory (it has no {CONFIG})")
    rows = run.read_epochs()
    if not rows:
        raise ConfigError(f"{run.uri}: no epoch has been finished yet")
    last = {row["epoch"]: row for row in sorted(rows, key=lambda row: row["incarnation"])}
    config = yaml.safe_load(run.read_text(CONFIG))
    return History(
        # The record of a user's own loop lies in a folder of Ray Train's run, whose name is in it.
        name=run.name if "task" in config else config["name"],
        config=config,
        epochs=tuple(last[epoch] for epoch in sorted(last)),
        decisions=tuple(run.read_decisions()),
        num_lost=len(rows) - len(last),
        evaluations=_that_count(run.read_evaluations()),
    )


def _that_count(evaluations: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Of each step, the last incarnation's."""
    by_step = {row["step"]: row for row in sorted(evaluations, key=lambda row: row["incarnation"])}
    return tuple(by_step[step] for step in sorted(by_step))
