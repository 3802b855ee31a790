"""Handwritten digits, 8 x 8 pixels: 1,437 rows to train on, 360 to validate; ships with its data.

``task_args``: ``channels``, filters of the two convolutions (``[16, 32]``).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError

DATA = Path(__file__).parent / "data" / "digits"
SIDE, NUM_CLASSES, BRIGHTEST = 8, 10, 16.0


class DigitsModel(nn.Module):
    """Pixels [rows, 64] of 0 to 16 -> scores [rows, 10].

    Args:
        channels: Filters of the two convolutions.
    """

    def __init__(self, channels: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels[0], 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels[0], channels[1], 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(channels[1] * (SIDE // 2) ** 2, NUM_CLASSES),
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Scores of a batch of images."""
        scores: torch.Tensor = self.layers(pixels.view(-1, 1, SIDE, SIDE) / BRIGHTEST)
        return scores


def datasets(config: Config) -> dict[str, str]:
    """The Parquet files shipped with the package."""
    return {"train": str(DATA / "train.parquet"), "validation": str(DATA / "validation.parquet")}


def build_model(config: Config) -> nn.Module:
    """A small convolutional network.

    Raises:
        ConfigError: an unknown argument, or other than two numbers of channels.
    """
    unknown = sorted(set(config.task_args) - {"channels"})
    if unknown:
        raise ConfigError(f"task_args.{unknown[0]}: unknown key; allowed: channels")
    channels = config.task_args.get("channels", [16, 32])
    if not isinstance(channels, list) or [type(c) for c in channels] != [int, int] or min(channels) < 1:
        raise ConfigError(f"task_args.channels is {channels!r}; allowed: two whole numbers of at least 1")
    return DigitsModel((channels[0], channels[1]))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Summed cross-entropy, and the number of rows."""
    return F.cross_entropy(model(batch["pixels"]), batch["label"], reduction="sum"), len(batch["label"])


def metrics(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``accuracy``, as a sum over rows."""
    return {"accuracy": (model(batch["pixels"]).argmax(dim=1) == batch["label"]).sum()}
