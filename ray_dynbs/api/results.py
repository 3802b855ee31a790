"""What runs and searches have left on a cluster, read from where they are used."""

from __future__ import annotations

import io
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import yaml

from ray_dynbs.cluster.remote import read_files
from ray_dynbs.core.decision import Decision
from ray_dynbs.core.journal import decode_lines
from ray_dynbs.report.history import History, read_history
from ray_dynbs.report.panels import draw_png
from ray_dynbs.storage.run_directory import (
    CONFIG,
    DECISIONS,
    EPOCHS,
    EVALUATIONS,
    MODEL,
    RunDirectory,
)
from ray_dynbs.storage.search_directory import BEST, SEARCH_PAGE, TRIALS
from ray_dynbs.storage.tables import EPOCH_SCHEMA, read_table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Picture:
    """A PNG that a notebook shows.

    Attributes:
        png: Its bytes.
    """

    png: bytes = field(repr=False)

    def _repr_png_(self) -> bytes:
        return self.png

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_bytes(self.png)


@dataclass(frozen=True)
class Page:
    """An HTML page of its own that a notebook shows in a frame.

    Attributes:
        html: Its text.
    """

    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        from html import escape

        style = "width: 100%; height: 900px; border: none"
        return f'<iframe srcdoc="{escape(self.html, quote=True)}" style="{style}"></iframe>'

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text(self.html)


@dataclass(frozen=True)
class BestCheckpoint:
    """The weights of a run's best epoch.

    Attributes:
        uri: Where they are, on the cluster or in a bucket.
        epoch: The epoch, from 0; ``None`` without a finished epoch.
        metric: Name of the metric.
        value: Its value; ``None`` without validation data.
    """

    uri: str
    epoch: int | None
    metric: str
    value: float | None

    def load(self) -> dict[str, Any]:
        """The plain state dict, on the CPU, for ``model.load_state_dict``.

        Raises:
            FileNotFoundError: it has not been saved yet.
        """
        import torch

        folder, _, name = self.uri.rpartition("/")
        found = read_files(folder, [name])
        if name not in found:
            raise FileNotFoundError(f"{self.uri}: not there yet; it is written at the end of the first epoch")
        state: dict[str, Any] = torch.load(io.BytesIO(found[name]), map_location="cpu", weights_only=True)
        return state


class Record(ABC):
    """A directory on the cluster. Everything is read when it is asked for, also while the run goes on."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """Of the directory."""


class RunRecord(Record):
    """A run directory."""

    @property
    def epochs(self) -> pa.Table:
        """``epochs.parquet``: one row per epoch, lost work included (the highest incarnation counts)."""
        found = read_files(self.uri, [EPOCHS])
        where = f"{self.uri}/{EPOCHS}"
        return read_table(found[EPOCHS], where) if found else EPOCH_SCHEMA.empty_table()

    @property
    def epochs_frame(self) -> pd.DataFrame:
        """The same as a pandas data frame."""
        frame: pd.DataFrame = self.epochs.to_pandas()
        return frame

    @property
    def decisions(self) -> list[Decision]:
        """The journal: every decision with its signal and reasons."""
        found = read_files(self.uri, [DECISIONS])
        return decode_lines(found.get(DECISIONS, b"").decode(), f"{self.uri}/{DECISIONS}")

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration; empty before it is written."""
        config: dict[str, Any] = yaml.safe_load(read_files(self.uri, [CONFIG]).get(CONFIG, b"{}"))
        return config

    def history(self) -> History:
        """The run as its report sees it.

        Raises:
            ConfigError: no epoch has been finished yet.
        """
        with tempfile.TemporaryDirectory() as folder:
            mirror = RunDirectory(f"{folder}/{self.uri.rstrip('/').rpartition('/')[2]}")
            mirror.make()
            for name, content in read_files(self.uri, [CONFIG, DECISIONS, EPOCHS, EVALUATIONS]).items():
                mirror.write_bytes(name, content)
            return read_history(mirror)

    def plot(self) -> Picture:
        """The curves of ``report.png``.

        Raises:
            ConfigError: no epoch has been finished yet.
        """
        return Picture(draw_png([self.history()]))

    @property
    def best_checkpoint(self) -> BestCheckpoint:
        """The weights of the best epoch by the metric; of the last one without validation data."""
        history = self.history()
        mode = max if history.config["metric"]["mode"] == "max" else min
        measured = [row for row in history.epochs if row["val_metric"] is not None]
        best = mode(measured, key=lambda row: row["val_metric"]) if measured else history.epochs[-1]
        return BestCheckpoint(
            f"{self.uri}/{MODEL}",
            int(best["epoch"]),
            history.metric,
            best["val_metric"] if measured else None,
        )


class SearchRecord(Record):
    """A search's directory."""

    @property
    def trials(self) -> pa.Table:
        """``trials.parquet``: one row per trial, the best first; empty until the search has ended."""
        found = read_files(self.uri, [TRIALS])
        return read_table(found[TRIALS], f"{self.uri}/{TRIALS}") if found else pa.table({})

    @property
    def trials_frame(self) -> pd.DataFrame:
        """The same as a pandas data frame."""
        frame: pd.DataFrame = self.trials.to_pandas()
        return frame

    @property
    def best(self) -> dict[str, Any] | None:
        """The best trial's configuration, which ``train`` takes; ``None`` until the search has ended."""
        found = read_files(self.uri, [BEST])
        return yaml.safe_load(found[BEST]) if found else None

    def plot(self) -> Page:
        """The search's page.

        Raises:
            FileNotFoundError: the search has not ended yet, or nothing came of it.
        """
        found = read_files(self.uri, [SEARCH_PAGE])
        if SEARCH_PAGE not in found:
            raise FileNotFoundError(
                f"{self.uri}/{SEARCH_PAGE}: not there; it is written when the search ends"
            )
        return Page(found[SEARCH_PAGE].decode())
