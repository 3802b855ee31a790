"""Activation checkpointing: layers whose activations are computed again in the backward instead of kept.

Memory per row falls from all activations of a layer to its inputs, for about a third more computation (Chen
et al. 2016, arXiv 1604.06174). Gradients are the same bit by bit: random numbers are replayed, and the
running statistics of BatchNorm count the rows once.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ray_dynbs.core.errors import ConfigError

Layers = str | Sequence[str]
"""``auto``, or names of layer classes."""
_OWN_WAYS = (
    ("activation_checkpointing_enable", "activation_checkpointing_kwargs"),
    ("gradient_checkpointing_enable", "gradient_checkpointing_kwargs"),
)
"""Methods by which models of the transformers library do it themselves, the newer one first."""


def checkpoint_activations(model: nn.Module, layers: Layers) -> dict[str, int]:
    """Let layers of a model compute their activations again; names of parameters stay as they are.

    Args:
        model: The model; its layers' classes are replaced by subclasses of the same names.
        layers: Class names of layers, or ``auto``: where the model knows how to do it (transformers) its own
            way, else the layers that repeat, in a ``ModuleList`` or a ``Sequential``.

    Returns:
        What does so now: classes of layers, or of the parts that do it in their own way -> how many.

    Raises:
        ConfigError: there is no such layer, or none that repeats (says which classes there are), or the model
            has a way of its own, and refuses or is not asked.
    """
    knowing = _knowing(model)
    if knowing and isinstance(layers, str):
        for part in knowing:
            _ask(part)
        return _counted(knowing)
    found = _repeated(model) if isinstance(layers, str) else _named(model, layers)
    for part in knowing:
        if any(layer in found for layer in part.modules()):
            # Its layers fill caches of keys, which their repetition would fill once more.
            raise ConfigError(
                f"memory.activation_checkpointing names layers of {type(part).__name__}, which does it in "
                "its own way; allowed: auto, or off"
            )
    counted = _counted(found)
    for layer in found:
        layer.__class__ = _recomputing(type(layer))  # type: ignore[arg-type]  # mypy on Module.__hash__
    return counted


def _counted(layers: Sequence[nn.Module]) -> dict[str, int]:
    return dict(Counter(type(layer).__name__ for layer in layers))


def _knowing(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that know how to do it, but for those inside of one."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for part in model.modules():
        if part not in inside and any(callable(getattr(part, name, None)) for name, _ in _OWN_WAYS):
            found.append(part)
            inside.update(part.modules())
    return found


def _ask(part: nn.Module) -> None:
    """Let a part do it in its own way.

    Raises:
        ConfigError: it refuses.
    """
    name, argument = next(way for way in _OWN_WAYS if callable(getattr(part, way[0], None)))
    try:
        getattr(part, name)(**{argument: {"use_reentrant": False}})
    except ValueError as error:
        raise ConfigError(f"memory.activation_checkpointing: {error}; allowed: off") from error


def _repeated(model: nn.Module) -> list[nn.Module]:
    """Layers made of others, of which several of one class follow each other; the outermost of each kind.

    Raises:
        ConfigError: there are none.
    """
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for parent in model.modules():  # parents come before their children
        if parent in inside or not isinstance(parent, nn.ModuleList | nn.Sequential):
            continue
        counts = Counter(type(child) for child in parent)
        for child in parent:
            if counts[type(child)] > 1 and any(True for _ in child.children()) and child not in inside:
                found.append(child)
                inside.update(child.modules())
    if not found:
        raise ConfigError(
            "memory.activation_checkpointing is 'auto', and the model has no layers that repeat in a "
            f"ModuleList or Sequential; allowed: names of its layers' classes ({_classes(model)}), or off"
        )
    return found


def _named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The layers of these classes, but for those inside of one.

    Raises:
        ConfigError: there are none of a name.
    """
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    seen: set[str] = set()
    for layer in model.modules():
        if type(layer).__name__ in names:
            seen.add(type(layer).__name__)
            if layer not in inside:
                found.append(layer)
                inside.update(layer.modules())
    missing = [name for name in names if name not in seen]
    if missing:
        raise ConfigError(
            f"memory.activation_checkpointing names {missing[0]!r}, which the model has no layer of; "
            f"allowed: {_classes(model)}"
        )
    if model in found:
        raise ConfigError(
            f"memory.activation_checkpointing names {type(model).__name__!r}, the model itself, which would "
            "keep nothing and save nothing; allowed: layers inside of it"
        )
    return found


def _classes(model: nn.Module) -> str:
    kinds = {type(layer).__name__ for layer in model.modules() if layer is not model}
    kinds = {kind for kind in kinds if not hasattr(nn, kind)} or kinds
    return ", ".join(sorted(kinds)[:10]) or "none"


@functools.cache
def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose forward keeps its inputs only; of the same name, and its copies are of it too."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(kind.forward, self)
        compiles = torch.compiler.is_compiling()  # which knows no contexts
        if not torch.is_grad_enabled() or (compiles and _norms(self)):
            return plain(*args, **kwargs)
        if compiles:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)
        contexts = functools.partial(_contexts, self)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        """As the plain class does it, for copies and pickles, which know classes by name."""
        recomputing, self.__class__ = type(self), kind
        try:
            reduced: Any = kind.__reduce_ex__(self, protocol)
        finally:
            self.__class__ = recomputing
        make, arguments, *rest = reduced
        return _made, (make, arguments), *rest

    own = {
        "forward": forward,
        "__reduce_ex__": reduce_ex,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), own)


def _made(make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """An instance, still to be filled."""
    made = make(*arguments)
    made.__class__ = _recomputing(type(made))  # type: ignore[arg-type]
    return made


def _contexts(
    layer: nn.Module,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Around the forward, and around its repetition, which draws the same random numbers."""
    return contextlib.nullcontext(), _again(layer, random.getstate(), np.random.get_state())  # noqa: NPY002


def _norms(layer: nn.Module) -> list[_NormBase]:
    """Those in it that keep running statistics of what they see."""
    norms = [each for each in layer.modules() if isinstance(each, _NormBase)]
    return [norm for norm in norms if norm.training and norm.track_running_stats]


@contextlib.contextmanager
def _again(layer: nn.Module, python: Any, numpy: Any) -> Iterator[None]:
    """Python's and numpy's random numbers as they were; torch looks after its own."""
    now = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    try:
        with _still(layer):
            yield
    finally:
        random.setstate(now[0])
        np.random.set_state(now[1])  # noqa: NPY002


@contextlib.contextmanager
def _still(layer: nn.Module) -> Iterator[None]:
    """Norms in it go by the rows at hand, as they did, but do not count them once more."""
    norms = _norms(layer)
    kept = [(norm, norm.momentum, _copied(norm.num_batches_tracked)) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:  # also where torch breaks the repetition off, having all it needs
        for norm, momentum, counted in kept:
            norm.momentum = momentum
            if norm.num_batches_tracked is not None and counted is not None:
                norm.num_batches_tracked.copy_(counted)


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
