"""What these tests need that other machines have not."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def gpu() -> torch.device:
    """The first CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch finds none")
    return torch.device("cuda:0")
