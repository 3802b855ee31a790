"""A multi-layer perceptron on numeric columns: works on any Parquet data by configuration.

``data.features`` names the input columns (numbers, or lists of numbers of one length) and
``data.label`` the column to predict. ``task_args``:

* ``num_inputs``: numbers per row over all features; the number of features if left out
* ``num_classes``: labels are whole numbers below it; left out: regression with squared error
* ``hidden``: widths of the hidden layers, ``[64]``
* ``input_scale``: multiplied onto the inputs, 1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError

ALLOWED = ("num_inputs", "num_classes", "hidden", "input_scale")


class TabularModel(nn.Module):
    """Columns -> scores [rows, num_outputs].

    Args:
        features: Input columns.
        label: Column to predict.
        num_inputs: Numbers per row.
        hidden: Widths of the hidden layers.
        num_classes: Classes, or ``None`` for regression.
        input_scale: Multiplied onto the inputs.
    """

    def __init__(
        self,
        features: Sequence[str],
        label: str,
        *,
        num_inputs: int,
        hidden: Sequence[int],
        num_classes: int | None,
        input_scale: float,
    ) -> None:
        super().__init__()
        self.features, self.label = list(features), label
        self.num_classes, self.input_scale = num_classes, input_scale
        widths = [num_inputs, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes or 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Scores of a batch of columns."""
        dtype = next(self.layers.parameters()).dtype
        parts = [batch[name].reshape(len(batch[name]), -1).to(dtype) for name in self.features]
        scores: torch.Tensor = self.layers(torch.cat(parts, dim=1) * self.input_scale)
        return scores


def build_model(config: Config) -> nn.Module:
    """The perceptron that ``data`` and ``task_args`` describe.

    Raises:
        ConfigError: no features or label, or an unknown argument.
    """
    arguments = dict(config.task_args)
    for key in arguments:
        if key not in ALLOWED:
            raise ConfigError(f"task_args.{key}: unknown key; allowed: {', '.join(ALLOWED)}")
    columns, label = config.data.columns, config.data.label
    if columns is None or label is None:
        raise ConfigError("data.features and data.label: both are needed by ray_dynbs.tasks.tabular")
    _check_types(arguments)
    features = columns[:-1]
    return TabularModel(
        features,
        label,
        num_inputs=arguments.get("num_inputs", len(features)),
        hidden=arguments.get("hidden", [64]),
        num_classes=arguments.get("num_classes"),
        input_scale=arguments.get("input_scale", 1.0),
    )


def _check_types(arguments: dict[str, Any]) -> None:
    for key in ("num_inputs", "num_classes"):
        if key in arguments and (type(arguments[key]) is not int or arguments[key] < 1):
            raise ConfigError(f"task_args.{key} is {arguments[key]!r}; allowed: a whole number of at least 1")
    hidden, scale = arguments.get("hidden", []), arguments.get("input_scale", 1.0)
    if not isinstance(hidden, list) or any(type(width) is not int or width < 1 for width in hidden):
        raise ConfigError(f"task_args.hidden is {hidden!r}; allowed: a list of whole numbers of at least 1")
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ConfigError(f"task_args.input_scale is {scale!r}; allowed: a number")


def loss(model: TabularModel, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Summed cross-entropy or squared error, and the number of rows."""
    scores, target = model(batch), batch[model.label]
    if model.num_classes is None:
        return F.mse_loss(scores.squeeze(1), target.to(scores.dtype), reduction="sum"), len(target)
    return F.cross_entropy(scores, target.long(), reduction="sum"), len(target)


def metrics(model: TabularModel, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``accuracy`` for classes, ``absolute_error`` for regression, as sums over rows."""
    scores, target = model(batch), batch[model.label]
    if model.num_classes is None:
        return {"absolute_error": (scores.squeeze(1) - target).abs().sum()}
    return {"accuracy": (scores.argmax(dim=1) == target).sum()}
