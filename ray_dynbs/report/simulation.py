"""The picture of a simulated run."""

from __future__ import annotations

import io
from collections.abc import Sequence

from ray_dynbs.core.simulator import SimulatedEpoch


def draw_simulation(epochs: Sequence[SimulatedEpoch], policy: str) -> bytes:
    """Batch size and noise scale over the passes, and progress over time, as a PNG.

    Args:
        epochs: The passes.
        policy: What decided, for the title.
    """
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(10, 4), layout="constrained")
    sizes, speed = figure.subplots(1, 2)
    numbers = [each.epoch + 1 for each in epochs]
    sizes.plot(numbers, [each.global_batch_size for each in epochs], drawstyle="steps-mid", label="batch")
    sizes.plot(numbers, [each.noise_scale for each in epochs], linestyle="--", label="noise scale")
    sizes.set(xlabel="epoch", ylabel="rows", yscale="log", title=f"{policy}, simulated")
    sizes.legend()
    speed.plot([each.time_s for each in epochs], [each.progress for each in epochs])
    speed.set(xlabel="seconds", ylabel="passes at full efficiency", title="Progress")
    for axes in (sizes, speed):
        axes.grid(alpha=0.3)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()
