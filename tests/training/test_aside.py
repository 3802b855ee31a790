"""Copies of tensors aside: equal, out of the process's memory, and without a trace."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from ray_dynbs.training import aside
from ray_dynbs.training.aside import LARGE_BYTES, copy_aside
from ray_dynbs.training.memory import anonymous_bytes
from tests.control_groups import control_group, run_script

MIB = 2**20
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int16]


def large(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 256, (600, 4096), dtype=torch.uint8, generator=generator)
    return (whole < 128) if dtype == torch.bool else whole.view(torch.uint8).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    whole = [each.contiguous().view(torch.uint8) for each in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and bool((whole[0] == whole[1]).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_are_equal_and_their_own(dtype: torch.dtype) -> None:
    for tensor in (large(dtype), large(dtype).T, large(dtype)[::2], large(dtype)[:3, :40]):
        copy = copy_aside(tensor)
        assert same_bits(copy, tensor)
        tensor.zero_()
        assert not same_bits(copy, tensor)
        copy.zero_()


def test_odd_tensors_are_copied_as_they_are() -> None:
    sparse = large().to_sparse()
    assert copy_aside(sparse).is_sparse
    expanded = torch.ones(1).expand(LARGE_BYTES)
    assert same_bits(copy_aside(expanded), expanded)
    parameter = torch.nn.Parameter(large())
    assert not copy_aside(parameter).requires_grad


def test_large_ones_take_no_memory_and_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tensors = [torch.full((16, MIB), float(number)) for number in range(4)]  # 64 MiB each
    before = anonymous_bytes()
    copies = [copy_aside(tensor) for tensor in tensors]
    assert anonymous_bytes() - before < 16 * MIB
    assert all(same_bits(*pair) for pair in zip(copies, tensors, strict=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trouble", ["a full disk", "no folder", "another system"])
def test_where_no_file_can_be_had_they_are_in_memory(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if trouble == "another system":
        monkeypatch.delattr(os, "posix_fallocate")
    elif trouble == "no folder":
        monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    else:
        monkeypatch.setattr(aside.os, "posix_fallocate", full)
    tensor = large()
    assert same_bits(copy_aside(tensor), tensor)


COPIES = """
import torch
from ray_dynbs.training.aside import copy_aside
tensor = torch.arange(100 * 2**20, dtype=torch.int32)
copies = [{copy} for number in range(3)]
print(all(torch.equal(copy, tensor + number) for number, copy in enumerate(copies)))
"""


@pytest.mark.slow
def test_they_end_no_process_that_has_no_room_for_them() -> None:
    """400 MiB, three copies of it, in a control group of 1.5 GiB; in memory the kernel kills it."""
    with control_group(3 * 2**29) as group:
        code, lines, err = run_script(COPIES.format(copy="copy_aside(tensor + number)"), limited_by=group)
        assert (code, lines) == (0, ["True"]), err
        assert group.kills == 0
        code = run_script(COPIES.format(copy="(tensor + number).clone()"), limited_by=group)[0]
        assert code == -9
        assert group.kills == 1
