"""Handwritten digits, 8 x 8 pixels: 1,437 rows to train on, 360 to validate; ships with its data.

``task_args``: ``hidden``, widths of the hidden layers (``[64]``).
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.tasks.tabular import TabularModel, loss, metrics

__all__ = ["build_model", "datasets", "loss", "metrics"]

DATA = Path(__file__).parent / "data" / "digits"


def datasets(config: Config) -> dict[str, str]:
    """The Parquet files shipped with the package."""
    return {"train": str(DATA / "train.parquet"), "validation": str(DATA / "validation.parquet")}


def build_model(config: Config) -> nn.Module:
    """A perceptron on the 64 pixels.

    Raises:
        ConfigError: an unknown argument.
    """
    unknown = sorted(set(config.task_args) - {"hidden"})
    if unknown:
        raise ConfigError(f"task_args.{unknown[0]}: unknown key; allowed: hidden")
    hidden = config.task_args.get("hidden", [64])
    return TabularModel(["pixels"], "label", num_inputs=64, hidden=hidden, num_classes=10, input_scale=1 / 16)
