"""Mixed precision: autocast and, for fp16, the loss scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch

from ray_dynbs.core.errors import ConfigError

Precision = Literal["auto", "fp32", "bf16", "fp16", "fp64"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MixedPrecision:
    """What a precision means for the forward pass and for the optimizer.

    Weights are float32 (float64 under ``fp64``, which is meant for verification); ``bf16`` and
    ``fp16`` run the forward under autocast, ``fp16`` with loss scaling. ``auto`` is ``bf16`` on a
    device that computes in it, and ``fp32`` elsewhere.

    Raises:
        ConfigError: an unknown precision.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        if precision not in get_args(Precision):
            raise ConfigError(f"precision is {precision!r}; allowed: {', '.join(get_args(Precision))}")
        if precision == "auto":
            precision = "bf16" if computes_in_bf16(device) else "fp32"
        self._device_type, self._device = device.type, device
        self._autocast_dtype = _AUTOCAST.get(precision)
        self.weight_dtype = torch.float64 if precision == "fp64" else torch.float32
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def begin(self) -> None:
        """Before a step: the loss scaler makes its scale with the first loss, and a rank may have no rows."""
        if self.scaler.is_enabled() and self.scaler._scale is None:
            self.scaler.scale(torch.zeros((), device=self._device))

    def autocast(self) -> AbstractContextManager[object]:
        """The context for forward and loss."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._autocast_dtype)


def computes_in_bf16(device: torch.device) -> bool:
    """Whether a device has instructions for bfloat16; emulated, it is slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # torch has no public question for this; where a future one lacks these, float32 is the safe answer.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return device.type == "cpu" and any(bool(getattr(torch.cpu, name, bool)()) for name in names)
