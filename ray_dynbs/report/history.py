"""A run as its report sees it: the epochs that count, the decisions, the restarts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from ray_dynbs.core.decision import Decision
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.journal import decode_lines
from ray_dynbs.storage.run_directory import CONFIG, DECISIONS, RunDirectory


@dataclass(frozen=True)
class History:
    """One run.

    Attributes:
        name: Its directory's name; that of Ray Train's run for a loop of the user's own.
        config: The resolved configuration.
        epochs: Rows of ``epochs.parquet`` that count: of each epoch, the last incarnation's.
        decisions: The journal, lost work included.
        num_lost: Epochs trained that a roll-back undid.
    """

    name: str
    config: dict[str, Any]
    epochs: tuple[dict[str, Any], ...]
    decisions: tuple[Decision, ...]
    num_lost: int

    @property
    def metric(self) -> str:
        """Name of the configured metric."""
        return str(self.config["metric"]["name"])

    def column(self, name: str) -> list[float | None]:
        """One quantity over the epochs that count."""
        return [row[name] for row in self.epochs]

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
        decisions=tuple(decode_lines(run.read_text(DECISIONS))),
        num_lost=len(rows) - len(last),
    )
