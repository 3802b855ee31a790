"""Memory on a GPU: readings beside nvidia-smi's, and a probe beside the truth, on a GPT of 100 M parameters.

``python jobs/bench_gpu.py [--quick] [--json FILE]``, in under four minutes on a data-centre GPU. The truth is
found by bisection between the probe's answer and a size that does not fit, every size trained for real.
Without a CUDA device the same is done on the CPU with a small model, whose memory is taken to end after
256 MiB: it shows that the job runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch

from jobs.figures import show
from ray_dynbs.core.lr import Adjustment
from ray_dynbs.core.probed import ProbeResult
from ray_dynbs.tasks.bytes_lm import Arguments, ByteGPT, loss
from ray_dynbs.training.gauge import Gauge, MemoryGauge, Peak
from ray_dynbs.training.memory import read_memory
from ray_dynbs.training.oom import free_memory
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.probe import Probe
from ray_dynbs.training.recompute import checkpoint_activations
from ray_dynbs.training.sizes import SizeRunner
from ray_dynbs.training.step import OptimizerStep
from ray_dynbs.training.world import World

HEADROOM = 0.1
LARGE = Arguments(context=512, layers=14, width=768, heads=12)
SMALL = Arguments(context=64, layers=4, width=64, heads=4)
MOST, ROOM_ON_CPU = 100_000, 2**28
GIB = 2**30


class Ending:
    """A gauge of a memory that is taken to end so many bytes above what is held now.

    Args:
        gauge: Measures it.
        room_bytes: Left in it.
    """

    doubts, ends_at = (), None

    def __init__(self, gauge: Gauge, room_bytes: int) -> None:
        self._gauge = gauge
        gauge.reset()
        self._usable = gauge.peak().used_bytes + room_bytes

    def reset(self) -> None:
        self._gauge.reset()

    def peak(self) -> Peak:
        return Peak(self._gauge.peak().used_bytes, self._usable)


class Setup:
    """A byte-level GPT with AdamW on a device, alone in its world.

    Args:
        world: The device.
        sizes: Of the model.
        recomputes: Whether it computes its activations again.
    """

    def __init__(self, world: World, sizes: Arguments, *, recomputes: bool = False) -> None:
        torch.manual_seed(0)
        self.world, self._context = world, sizes.context
        self.model = ByteGPT(sizes).to(world.device)
        if recomputes:
            checkpoint_activations(self.model, "auto")
        self.precision = MixedPrecision("bf16" if world.device.type == "cuda" else "fp32", world.device)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.step = OptimizerStep(self.model, optimizer, world, self.precision)
        self.gauge: Gauge = MemoryGauge(world, HEADROOM)
        if world.device.type == "cpu":
            self.gauge = Ending(self.gauge, ROOM_ON_CPU)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def make_batch(self, rows: int) -> dict[str, torch.Tensor]:
        shape = (rows, self._context + 1)
        return {"text": torch.randint(0, 256, shape, dtype=torch.uint8, device=self.world.device)}

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return loss(self.model, batch)

    def probe(self) -> tuple[ProbeResult, float]:
        """What it finds, and the seconds it takes."""
        probe = Probe(self.model, self.step, self.precision, self.world, self.gauge)
        started = time.perf_counter()
        result = probe.find(self.loss, self.make_batch, start=8, most=MOST, sweep=True)
        return result, time.perf_counter() - started

    def truth(self, result: ProbeResult) -> int:
        """The largest size that leaves the head-room, found by bisection above the probe's answer."""
        runner = SizeRunner(self.step, self.world, self.gauge, self.loss, self.make_batch)
        fits, fails = result.largest, min(int(1.1 * result.largest) + 2, result.most + 1)
        while fails - fits > max(1, result.largest // 200):
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if runner.run(middle).fits else (fits, middle)
        return fits

    def bytes_per_row(self, rows: int) -> float:
        """From the peaks of two sizes, of which this is the larger one."""
        runner = SizeRunner(self.step, self.world, self.gauge, self.loss, self.make_batch)
        half = runner.run(rows // 2).peak_bytes or 0.0
        return ((runner.run(rows).peak_bytes or 0.0) - half) / (rows - rows // 2)

    def step_s(self, rows: int) -> float:
        """Seconds of one step of so many rows, after one that warms up."""
        for _ in range(2):
            started = time.perf_counter()
            found = self.step.run(
                [self.make_batch(rows)], self.loss, rows=rows, adjustment=Adjustment(lr=0.0)
            )
            found.loss_sum.item()
        return time.perf_counter() - started


def in_use_elsewhere(device: torch.device) -> tuple[float, str]:
    """Bytes in use by anybody, as somebody else tells."""
    if device.type != "cuda":
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available), "psutil"
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    command.append(f"--id={uuid if uuid.startswith('GPU-') else f'GPU-{uuid}'}")
    text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return float(text) * 2**20, "nvidia-smi"


def readings(device: torch.device) -> dict[str, Any]:
    """With 1 GiB allocated on purpose."""
    kept = torch.ones(GIB // 4, device=device)
    theirs, name = in_use_elsewhere(device)
    ours = read_memory(device).used_bytes
    del kept
    return case("memory in use by anybody", "GiB", ours / GIB, theirs / GIB, name)


def probes(world: World) -> list[dict[str, Any]]:
    """How close, how long, how fast, and what recomputing saves."""
    on_gpu = world.device.type == "cuda"
    sizes = LARGE if on_gpu else SMALL
    setup = Setup(world, sizes)
    millions = setup.num_parameters / 1e6
    result, seconds = setup.probe()
    found = f"largest micro-batch, {millions:.1f} M parameters, {len(result.tried)} sizes tried"
    rows = [case(found, "rows", result.largest, setup.truth(result), "bisection, by real steps")]
    speeds = {each.micro_batch_size: each.samples_per_s or 0.0 for each in result.tried}
    rows += [
        case("time of the probe", "s", seconds, setup.step_s(result.largest), "one step of the largest size"),
        case(
            f"speed of the fastest, {result.fastest} rows (knee {result.knee})",
            "rows/s",
            speeds[result.fastest],
            speeds[result.largest],
            "the largest",
        ),
    ]
    taken = setup.bytes_per_row(max(result.largest // 4, 1))
    del setup
    free_memory(world.device)
    saving = Setup(world, sizes, recomputes=True).bytes_per_row(max(result.largest // 4, 1))
    title = "memory for each row, activations computed again"
    rows.append(case(title, "MiB", saving / 2**20, taken / 2**20, "activations kept"))
    return rows


def case(title: str, unit: str, ours: float, baseline: float, name: str) -> dict[str, Any]:
    return {"case": title, "unit": unit, "ours": ours, "baseline": baseline, "baseline_name": name}


def expandable() -> bool:
    """Whether CUDA's memory lies in segments that grow."""
    return any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the same: it is short as it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    arguments = parser.parse_args()
    started = time.perf_counter()
    world = World.current("cuda:0" if torch.cuda.is_available() else "cpu")
    reading = read_memory(world.device)
    results = [readings(world.device), *probes(world)]
    title = f"{reading.source}, {reading.total_bytes / GIB:.1f} GiB"
    if world.device.type == "cuda":
        title += f", expandable segments: {'yes' if expandable() else 'no'}"
    show(results, f"{title}, {time.perf_counter() - started:.0f} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
