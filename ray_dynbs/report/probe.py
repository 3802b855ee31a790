"""The picture of a probe: memory and speed over the micro-batch size."""

from __future__ import annotations

import io

from ray_dynbs.core.probed import ProbeResult
from ray_dynbs.core.recommend import Measured


def draw_probe(result: ProbeResult, measured: Measured, name: str) -> bytes:
    """Memory and speed over the micro-batch as a PNG, with the largest size that fits and the knee.

    Args:
        result: Sizes tried.
        measured: What they come to.
        name: Of the run.
    """
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(10, 4), layout="constrained")
    memory, speed = figure.subplots(1, 2)
    tried = sorted(result.tried, key=lambda each: each.micro_batch_size)
    known = [each for each in tried if each.peak_bytes is not None]
    sizes = [each.micro_batch_size for each in known]
    memory.plot(sizes, [(each.peak_bytes or 0) / 2**30 for each in known], marker="o")
    memory.axhline(result.usable_bytes / 2**30, linestyle="--", color="#D55E00", label="what may be used")
    for rows in (each.micro_batch_size for each in tried if each.peak_bytes is None):
        memory.axvline(rows, linestyle=":", color="#9aa0a6", label=f"out of memory at {rows}")
    memory.set(xlabel="micro-batch (rows)", title=f"{name}: peak memory, GiB", ylim=(0, None))
    memory.legend()
    speed.plot(sizes, [each.samples_per_s or 0.0 for each in known], marker="o")
    for rows, words, height in ((measured.knee, "knee", 0.12), (measured.largest, "largest", 0.04)):
        speed.axvline(rows, linestyle="--", color="#0072B2")
        place = (rows, height)
        speed.annotate(f"{words}: {rows} ", place, xycoords=("data", "axes fraction"), ha="right")
    speed.set(xlabel="micro-batch (rows)", title="Rows per second and worker", ylim=(0, None))
    for axes in (memory, speed):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()
