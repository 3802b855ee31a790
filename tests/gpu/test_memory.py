"""Memory on a real GPU: readings, probes, running out, and what saves it."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jobs.bench_gpu import GIB, LARGE, SMALL, Setup, in_use_elsewhere
from ray_dynbs.core.lr import Adjustment
from ray_dynbs.training.gauge import MemoryGauge
from ray_dynbs.training.memory import MemoryWatch, PeakMeter, read_memory
from ray_dynbs.training.oom import free_memory, is_out_of_memory
from ray_dynbs.training.recompute import checkpoint_activations
from ray_dynbs.training.world import World

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi")
def test_readings_are_those_of_nvidia_smi(gpu: torch.device) -> None:
    """With 1 and with 9 GiB more."""
    for gibs in (1, 9):
        kept = torch.ones(gibs * GIB // 4, device=gpu)
        reading = read_memory(gpu)
        theirs, _ = in_use_elsewhere(gpu)
        assert reading.used_bytes == pytest.approx(theirs, abs=GIB)  # what the driver keeps for itself
        assert reading.own_bytes >= kept.nbytes
        assert reading.own_bytes <= reading.used_bytes <= reading.total_bytes
        assert reading.total_bytes == torch.cuda.get_device_properties(gpu).total_memory


def test_a_peak_is_that_since_the_last_reset(gpu: torch.device) -> None:
    meter = PeakMeter(gpu)
    meter.reset()
    before = meter.peak_bytes()
    large = torch.ones(GIB // 4, device=gpu)
    del large
    assert 0.9 * GIB < meter.peak_bytes() - before < 1.2 * GIB
    meter.reset()
    assert meter.peak_bytes() - before < 0.1 * GIB
    assert meter.held_bytes() - before < 0.1 * GIB


def test_what_is_found_is_within_three_per_cent_of_the_truth(gpu: torch.device) -> None:
    """A transformer of 100 M parameters, trained for real; the truth by bisection."""
    setup = Setup(World.current(gpu), LARGE)
    assert 95e6 < setup.num_parameters < 105e6
    weights = copy.deepcopy(setup.model.state_dict())
    result, _ = setup.probe()
    assert all(torch.equal(weights[name], now) for name, now in setup.model.state_dict().items())
    assert result.limit == "memory"
    truth = setup.truth(result)
    assert 0.97 * truth <= result.largest <= truth
    assert [each.fits for each in result.tried if each.micro_batch_size == result.largest] == [True]
    setup.gauge.reset()
    setup.step_s(result.largest)  # and trains
    assert setup.gauge.peak().fraction <= 1.02


def test_running_out_twenty_times_leaks_nothing(gpu: torch.device) -> None:
    setup = Setup(World.current(gpu), SMALL)
    setup.step_s(8)
    free_memory(gpu)
    held = torch.cuda.memory_allocated(gpu)
    for _ in range(20):
        problem = None
        try:
            setup.step.run(
                (setup.make_batch(rows) for rows in (8, 50_000_000)),
                setup.loss,
                rows=50_000_008,
                adjustment=Adjustment(lr=0.0),
            )
        except Exception as error:  # noqa: BLE001  # looked at outside, where its traceback is gone
            problem = is_out_of_memory(error)
        assert problem is True
        free_memory(gpu)
        assert torch.cuda.memory_allocated(gpu) <= held
    assert setup.step_s(8) > 0


def test_an_allocator_that_retried_reads_as_full(gpu: torch.device) -> None:
    """Half of the memory cached, and then more than the other half asked for."""
    free_memory(gpu)
    watch, before = MemoryWatch(gpu), read_memory(gpu)
    total = before.total_bytes
    cached = torch.empty(int(0.5 * total), dtype=torch.uint8, device=gpu)
    del cached
    larger = torch.empty(int(0.7 * total), dtype=torch.uint8, device=gpu)
    retried = read_memory(gpu).retries > before.retries
    del larger
    free_memory(gpu)
    fraction = watch.fraction()
    # Segments that grow may do without a retry; then the reading is the plain one.
    assert fraction == 1.0 if retried else fraction < 0.5


def test_recomputing_saves_memory_and_changes_no_gradient(gpu: torch.device) -> None:
    peaks, gradients = [], []
    for recomputes in (False, True):
        setup = Setup(World.current(gpu), LARGE, recomputes=recomputes)
        setup.gauge.reset()
        setup.step.gradients.zero()
        torch.manual_seed(1)
        with setup.step.autocast():
            loss, _ = setup.loss(setup.make_batch(16))
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated(gpu))
        gradients.append(torch.cat([p.grad.flatten().cpu() for p in setup.model.parameters()]))
        del setup, loss
        free_memory(gpu)
    assert peaks[1] < 0.7 * peaks[0]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3 * float(gradients[0].abs().max()))
    with pytest.raises(Exception, match="no layer of"):
        checkpoint_activations(torch.nn.Linear(1, 1), ["Block"])


SEGMENTS = """
import torch
from ray_dynbs.training.world import World

World.current("cuda:0")
kept = torch.ones(2**24, device="cuda:0")
print([bool(segment.get("is_expandable")) for segment in torch.cuda.memory_snapshot()])
"""


@pytest.mark.parametrize("starts_before", [False, True])
def test_segments_grow_by_default(gpu: torch.device, starts_before: bool) -> None:
    """Also where CUDA was started before, as Ray Train does it, as long as nothing is allocated."""
    first = "import torch; torch.cuda.set_device(0); torch.cuda.init()\n" if starts_before else ""
    done = subprocess.run(
        [sys.executable, "-c", first + SEGMENTS],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[True]"


def test_ranks_that_share_a_device_have_a_share_each(gpu: torch.device) -> None:
    whole, half = (MemoryGauge(World.current(gpu), 0.1, share) for share in (1.0, 0.5))
    kept = torch.ones(GIB // 4, device=gpu)
    ratio = half.peak().usable_bytes / whole.peak().usable_bytes
    assert ratio == pytest.approx(0.5)
    assert half.peak().used_bytes >= kept.nbytes
