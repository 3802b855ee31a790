"""A training state taken aside and put back bit by bit, for steps that must leave no trace."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ray_dynbs.training.precision import MixedPrecision


class Snapshot:
    """Weights, buffers, optimizer state, loss scaler, random numbers and modes as they are now.

    Tensors are kept in the host's memory.

    Args:
        model: The model.
        optimizers: Its optimizers.
        precision: Its loss scaler.
        device: Where it computes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        precision: MixedPrecision,
        device: torch.device,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._precision, self._device = precision, device
        self._tensors = [tensor.detach().to("cpu", copy=True) for tensor in self._of_model()]
        self._states = [_states(optimizer) for optimizer in optimizers]
        self._groups = [[_settings(group) for group in each.param_groups] for each in optimizers]
        self._scaler = copy.deepcopy(precision.scaler.state_dict())
        self._modes = [(module, module.training) for module in model.modules()]
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self._device_random = _device_random(device)

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, kept in zip(self._of_model(), self._tensors, strict=True):
                tensor.copy_(kept)
            for each in zip(self._optimizers, self._states, self._groups, strict=True):
                _put_back_optimizer(*each)
        if self._scaler:
            self._precision.scaler.load_state_dict(copy.deepcopy(self._scaler))
        for module, mode in self._modes:
            module.training = mode
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])  # noqa: NPY002
        torch.set_rng_state(self._random[2])
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random, self._device)

    def _of_model(self) -> list[torch.Tensor]:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return [tensor.data for tensor in tensors]


def _states(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    return {parameter: _kept(state) for parameter, state in optimizer.state.items()}


def _kept(values: dict[str, Any]) -> dict[str, Any]:
    """A copy, with the tensors in the host's memory."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for key, value in values.items()
    }


def _put_back(present: dict[str, Any], kept: dict[str, Any], device: torch.device) -> None:
    """In place where a tensor is still there; what did not exist is gone again."""
    for key in [each for each in present if each not in kept]:
        del present[key]
    for key, value in kept.items():
        there = present.get(key)
        if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor) and there.shape == value.shape:
            there.copy_(value)
        elif isinstance(value, torch.Tensor):
            present[key] = value.to(device, copy=True)
        else:
            present[key] = copy.deepcopy(value)


def _put_back_optimizer(
    optimizer: torch.optim.Optimizer,
    states: dict[Any, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    for parameter in [each for each in optimizer.state if each not in states]:
        del optimizer.state[parameter]
    for parameter, kept in states.items():
        _put_back(optimizer.state[parameter], kept, parameter.device)
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        parameters = group.pop("params")
        _put_back(group, settings, torch.device("cpu"))
        group["params"] = parameters


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Of a parameter group, but for the parameters."""
    return _kept({key: value for key, value in group.items() if key != "params"})


def _device_random(device: torch.device) -> torch.Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None
