"""The plain model inside whatever a user's loop has wrapped it in."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ray_dynbs.core.errors import ConfigError

_SHARDED = (
    "parameters lie in pieces on the workers, which is not supported yet; allowed: plain models and DDP"
)


def plain_model(model: nn.Module) -> nn.Module:
    """The model without DistributedDataParallel, which from now on only passes calls through.

    The loop may keep calling its wrapped model: no call of it takes part in a collective any more, which
    is what lets ranks hold different numbers of micro-batches. Gradients are summed by the step instead.

    Raises:
        ConfigError: a model sharded by FSDP or DeepSpeed, or replicated by DataParallel.
    """
    refuse_sharded(model)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            _pass_through(module)
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def _pass_through(wrapper: DistributedDataParallel) -> None:
    # An attribute of the instance hides the class's method, and is no part of any state dict.
    wrapper.forward = wrapper.module.__call__  # type: ignore[method-assign]


def refuse_sharded(model: nn.Module) -> None:
    """Refuse what this library cannot reduce the gradients of.

    Raises:
        ConfigError: names the kind of wrapper.
    """
    for module in model.modules():
        kinds = [f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__]
        if any("FullyShardedDataParallel" in kind or "FSDPModule" in kind for kind in kinds):
            raise ConfigError(f"the model is sharded by FSDP: {_SHARDED}")
        if any(kind.startswith("deepspeed.") for kind in kinds):
            raise ConfigError(f"the model is a DeepSpeed engine: {_SHARDED}")
        if isinstance(module, DataParallel):
            raise ConfigError(
                "the model is a torch.nn.DataParallel; allowed: plain models and DDP, one process per device"
            )
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise ConfigError(f"parameter {name} is a DTensor (FSDP2 or tensor parallel): {_SHARDED}")
