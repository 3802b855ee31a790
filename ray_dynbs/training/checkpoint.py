"""Everything a run needs to go on exactly, saved and loaded together, without unpickling code.

Random numbers are derived, not stored: every rank reseeds at the start of each epoch from
``(seed, epoch, rank)``, so a resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.training.lr import Schedule
from ray_dynbs.training.precision import MixedPrecision

MODEL_FILE = "model.pt"
STATE_FILE = "state.pt"


def save(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    precision: MixedPrecision,
    progress: Mapping[str, Any],
) -> None:
    """Write model and training state.

    Args:
        folder: An existing local folder.
        model: Its plain state dict goes to a file of its own.
        optimizer: With the base LR: call it between steps only.
        schedule: The LR schedule.
        precision: Its loss scaler.
        progress: JSON-able: position in the data, manager state, best metric.
    """
    torch.save(model.state_dict(), folder / MODEL_FILE)
    state = {
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "scaler": precision.scaler.state_dict(),
        "progress": dict(progress),
    }
    torch.save(state, folder / STATE_FILE)


def load(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    precision: MixedPrecision,
    device: torch.device,
) -> dict[str, Any]:
    """Restore what :func:`save` wrote; returns ``progress``.

    Raises:
        ConfigError: the model or optimizer of the checkpoint does not fit the one given.
    """
    weights = torch.load(folder / MODEL_FILE, map_location=device, weights_only=True)
    state = torch.load(folder / STATE_FILE, map_location=device, weights_only=True)
    try:
        model.load_state_dict(weights)
        optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        first_line = " ".join(str(error).split())[:300]
        raise ConfigError(f"checkpoint does not fit this model or optimizer: {first_line}") from error
    schedule.load_state_dict(state["schedule"])
    if state["scaler"]:
        precision.scaler.load_state_dict(state["scaler"])
    progress: dict[str, Any] = state["progress"]
    return progress


def seed_everything(seed: int, epoch: int, rank: int) -> None:
    """Seed torch, numpy and random for one epoch on one rank."""
    words = np.random.SeedSequence([seed, epoch, rank]).generate_state(2)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002  # users' transforms use the global generator
    random.seed(int(words[1]))
