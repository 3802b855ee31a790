"""The picture of a probe: memory and speed over the micro-batch size."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from ray_dynbs.core.recommend import Measured


@dataclass(frozen=True)
class Point:
    """One size.

    Attributes:
        rows: The micro-batch.
        fraction: Peak memory over what may be used; ``None`` where it ran out.
        samples_per_s: Rows per second of one worker; ``None`` where it ran out.
        said: What is special about it.
    """

    rows: int
    fraction: float | None
    samples_per_s: float | None
    said: str


def draw_probe(points: Sequence[Point], measured: Measured, name: str) -> bytes:
    """Memory and speed as a PNG, with the largest size that fits and the knee.

    Args:
        points: Sizes tried, the smallest first.
        measured: What they come to.
        name: Of the run.
    """
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(10, 4), layout="constrained")
    memory, speed = figure.subplots(1, 2)
    known = [(p.rows, p.fraction, p.samples_per_s) for p in points if p.fraction is not None]
    memory.plot([rows for rows, _, _ in known], [fraction for _, fraction, _ in known], marker="o")
    memory.axhline(1.0, linestyle="--", color="#D55E00", label="what may be used")
    for rows in (p.rows for p in points if p.fraction is None):
        memory.axvline(rows, linestyle=":", color="#9aa0a6")
    memory.set(xlabel="micro-batch (rows)", title=f"{name}: peak memory, fraction", ylim=(0, None))
    memory.legend()
    speed.plot([rows for rows, _, _ in known], [each for _, _, each in known], marker="o")
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
