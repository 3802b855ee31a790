"""A training state taken aside and put back bit by bit, for steps that must leave no trace."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ray_dynbs.training.aside import copy_aside
from ray_dynbs.training.precision import MixedPrecision

_PLAIN = (bool, int, float, complex, str, type(None))
Kept = dict[str, Any]


class Snapshot:
    """What steps change, as it is now: in the model, the optimizers, the loss scaler, the random numbers.

    Of the model: parameters, buffers (also those that a forward makes or replaces), modes, and plain
    attributes (numbers, words, tensors, generators; not what is in lists and dictionaries). What a task keeps
    elsewhere it keeps. Tensors are copied to the host (``aside.py``).

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
        self._parameters = [(each, copy_aside(each)) for each in model.parameters()]
        self._modules = [_Module.of(module) for module in model.modules()]
        self._optimizers = [_Optimizer.of(optimizer) for optimizer in optimizers]
        self._scaler = precision.scaler
        self._scaler_state = copy.deepcopy(vars(precision.scaler))
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self._device, self._device_random = device, _device_random(device)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; as often as is wanted."""
        for parameter, kept in self._parameters:
            parameter.data.copy_(kept)
        for module in self._modules:
            module.restore()
        for optimizer in self._optimizers:
            optimizer.restore()
        vars(self._scaler).update(copy.deepcopy(self._scaler_state))
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])  # noqa: NPY002
        torch.set_rng_state(self._random[2])
        if self._device_random is not None:
            _set_device_random(self._device, self._device_random)


@dataclass(frozen=True)
class _Tensor:
    """A tensor, and its content as it was."""

    tensor: torch.Tensor
    content: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        return cls(tensor, copy_aside(tensor))

    def restored(self) -> torch.Tensor:
        """The same object, with the content put back."""
        if self.tensor.shape != self.content.shape:  # resized in place
            self.tensor.data = self.content.to(self.tensor.device, copy=True)
        elif not _is_expanded(self.tensor):  # else nobody can have written to it
            self.tensor.data.copy_(self.content)
        return self.tensor


@dataclass(frozen=True)
class _Module:
    """One module's own buffers and plain attributes, its mode among them."""

    module: torch.nn.Module
    buffers: dict[str, _Tensor | None]
    tensors: dict[str, _Tensor]
    generators: list[tuple[torch.Generator, torch.Tensor]]
    plain: Kept
    names: frozenset[str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Module:
        own, attributes = dict(module._buffers.items()), vars(module)
        return cls(
            module,
            {name: None if each is None else _Tensor.of(each) for name, each in own.items()},
            {k: _Tensor.of(v) for k, v in attributes.items() if isinstance(v, torch.Tensor)},
            [(v, v.get_state()) for v in attributes.values() if isinstance(v, torch.Generator)],
            {k: v for k, v in attributes.items() if isinstance(v, _PLAIN)},
            frozenset(attributes),
        )

    def restore(self) -> None:
        own, attributes = self.module._buffers, vars(self.module)
        for name in [each for each in dict(own.items()) if each not in self.buffers]:
            del own[name]
        for name, kept in self.buffers.items():
            own[name] = None if kept is None else kept.restored()
        for name in [each for each in attributes if each not in self.names]:
            del attributes[name]
        attributes.update({name: kept.restored() for name, kept in self.tensors.items()})
        attributes.update(self.plain)
        for generator, state in self.generators:
            generator.set_state(state)


@dataclass(frozen=True)
class _Optimizer:
    """An optimizer's state per parameter, and the settings of its groups."""

    optimizer: torch.optim.Optimizer
    states: dict[Any, Any]
    groups: list[Kept]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Optimizer:
        # By parameter, but an optimizer may keep something of its own there.
        states = {
            key: _kept(state) if isinstance(key, torch.Tensor) else copy.deepcopy(state)
            for key, state in dict[Any, Any](optimizer.state).items()
        }
        groups = [
            _kept({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups
        ]
        return cls(optimizer, states, groups)

    def restore(self) -> None:
        for parameter in [each for each in self.optimizer.state if each not in self.states]:
            del self.optimizer.state[parameter]
        for parameter, kept in self.states.items():
            if not isinstance(parameter, torch.Tensor):
                self.optimizer.state[parameter] = copy.deepcopy(kept)
                continue
            present = self.optimizer.state[parameter]
            for name in [each for each in present if each not in kept]:
                del present[name]
            _put_back(present, kept, parameter.device)
        for group, kept in zip(self.optimizer.param_groups, self.groups, strict=True):
            _put_back(group, kept, None)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several of its elements are one in memory."""
    return tensor.layout == torch.strided and any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _kept(values: Kept) -> Kept:
    """A copy, with the tensors on the host."""
    return {k: copy_aside(v) if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in values.items()}


def _put_back(present: Kept, kept: Kept, device: torch.device | None) -> None:
    """Values by name; tensors in place where they are still there."""
    for key, value in kept.items():
        there = present.get(key)
        if not isinstance(value, torch.Tensor):
            present[key] = copy.deepcopy(value)
        elif isinstance(there, torch.Tensor) and there.shape == value.shape:
            there.copy_(value)
        else:
            present[key] = value.to(device or value.device, copy=True)


def _device_random(device: torch.device) -> torch.Tensor | None:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    if device.type == "xpu":
        return torch.xpu.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None


def _set_device_random(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "xpu":
        torch.xpu.set_rng_state(state, device)
    else:
        torch.mps.set_rng_state(state)
