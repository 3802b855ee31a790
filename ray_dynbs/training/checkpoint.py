"""Everything a run needs to go on exactly, saved and loaded together, without unpickling code.

Random numbers are derived, not stored: every rank reseeds at the start of each epoch from
``(seed, epoch, rank)``, and with each checkpoint within an epoch from ``(seed, epoch, rank, step)``, so a
resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

import random
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.training.lr import Schedule
from ray_dynbs.training.precision import MixedPrecision

MODEL_FILE = "model.pt"
STATE_FILE = "state.pt"


@dataclass(frozen=True)
class TrainState:
    """The parts of training that a checkpoint holds.

    Attributes:
        model: The plain model.
        optimizer: With the base LR in its groups: save between steps only.
        schedule: The LR schedule.
        precision: Its loss scaler.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: MixedPrecision

    def save(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Write everything.

        Args:
            folder: An existing local folder. The model's state dict gets a file of its own.
            progress: JSON-able; its ``progress`` holds the position in the data.
        """
        torch.save(self.model.state_dict(), folder / MODEL_FILE)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "progress": dict(progress),
        }
        torch.save(state, folder / STATE_FILE)

    def load(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Restore what :meth:`save` wrote; returns ``progress``.

        Raises:
            ConfigError: a file is missing or damaged, or its model or optimizer does not fit these.
        """
        weights = load_file(folder / MODEL_FILE, device)
        state = load_file(folder / STATE_FILE, device)
        try:
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            first_line = " ".join(str(error).split())[:300]
            raise ConfigError(f"checkpoint does not fit this model or optimizer: {first_line}") from error
        if state["scaler"]:
            self.precision.scaler.load_state_dict(state["scaler"])
        progress: dict[str, Any] = state["progress"]
        place = progress["progress"]
        self.schedule.load_state_dict(
            state["schedule"], place["epoch"], place["rows_in_epoch"], place["gain"]
        )
        return progress


def load_file(file: Path, device: torch.device) -> Any:
    """What ``torch.save`` wrote, without unpickling code.

    Raises:
        ConfigError: it is missing, or ends too early; names it.
    """
    if not zipfile.is_zipfile(file):
        raise ConfigError(f"{file}: missing, damaged or not written to its end")
    return torch.load(file, map_location=device, weights_only=True)


def seed_everything(seed: int, epoch: int, rank: int, step: int = 0) -> None:
    """Seed torch, numpy and random for one epoch on one rank, or for what follows a step within it."""
    words = np.random.SeedSequence([seed, epoch, rank, step] if step else [seed, epoch, rank]).generate_state(
        2
    )
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002  # users' transforms use the global generator
    random.seed(int(words[1]))
