"""The pictures of a report: one panel per quantity, all over the samples seen."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_dynbs.report.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart by all kinds of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it can be selected and searched
    "svg.hashsalt": "ray_dynbs",
}


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        title: What it shows, with its unit.
        columns: Columns of ``epochs.parquet`` drawn in it, the first one solid.
        scale: Axis scale: ``linear``, ``log`` or ``log2``.
    """

    title: str
    columns: tuple[str, ...]
    scale: str = "linear"


def panels_of(histories: Sequence[History]) -> list[Panel]:
    """The panels for which at least one run has numbers."""
    metrics = {history.metric for history in histories}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    wanted = [
        Panel("Global batch size (rows)", ("global_batch_size",), "log2"),
        Panel("Learning rate", ("lr",), "log"),
        Panel("Loss (training solid, validation dashed)", ("train_loss", "val_loss"), "log"),
        Panel(f"Validation {metric}", ("val_metric",)),
        Panel("Gradient norm", ("grad_norm",), "log"),
        Panel("Gradient noise scale (rows)", ("noise_scale",), "log"),
        Panel("Throughput (samples/s)", ("samples_per_s",)),
        Panel("Memory in use (fraction, worst worker)", ("memory_fraction",)),
    ]
    if metric == "loss":
        wanted = [panel for panel in wanted if "val_metric" not in panel.columns]
    return [panel for panel in wanted if any(h.curve(c) for h in histories for c in panel.columns)]


def draw_panel(panel: Panel, histories: Sequence[History], axes: Axes) -> None:
    """Draw one panel: every run a colour, restarts as dotted lines."""
    for history, colour in zip(histories, _colours(len(histories)), strict=True):
        for number, column in enumerate(panel.columns):
            points = history.curve(column)
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(
                    x,
                    y,
                    color=colour,
                    linestyle=("-", "--")[number],
                    marker="o",
                    markersize=3.5,
                    drawstyle="steps-pre" if column == "global_batch_size" else "default",
                    label=history.name if number == 0 else None,
                )
        for start in history.starts[1:]:
            axes.axvline(start.samples_seen, color=colour, linestyle=":", linewidth=1)
    axes.set_title(panel.title, loc="left", fontsize=12)
    axes.set_xlabel("samples seen")
    _scale(panel, histories, axes)
    if len(histories) > 1:
        axes.legend(fontsize=9)


def draw_svg(panel: Panel, histories: Sequence[History]) -> str:
    """One panel as an SVG element without XML header."""
    return svg_of(lambda axes: draw_panel(panel, histories, axes))


def svg_of(draw_axes: Callable[[Axes], None]) -> str:
    """Whatever is drawn into one set of axes, as an SVG element without XML header."""
    buffer = io.StringIO()

    def draw(figure: Any) -> None:
        draw_axes(figure.subplots())
        figure.savefig(buffer, format="svg", metadata={"Date": None})

    _with_figure((5.6, 3.2), draw)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def draw_png(histories: Sequence[History]) -> bytes:
    """All panels on one sheet."""
    panels = panels_of(histories)
    buffer = io.BytesIO()
    rows = math.ceil(len(panels) / 2)

    def draw(figure: Any) -> None:
        grid = figure.subplots(rows, 2, squeeze=False).flat
        for panel, axes in zip(panels, grid, strict=False):
            draw_panel(panel, histories, axes)
        for axes in list(grid)[len(panels) :]:
            axes.set_axis_off()
        figure.suptitle(", ".join(history.name for history in histories), x=0.01, ha="left", weight="bold")
        figure.savefig(buffer, format="png", dpi=100)

    _with_figure((12, 3.2 * rows + 0.4), draw)
    return buffer.getvalue()


def _with_figure(size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """A figure that belongs to nobody's global state, in this module's style."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        draw(Figure(figsize=size, layout="constrained"))


def _scale(panel: Panel, histories: Sequence[History], axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    values = [y for h in histories for c in panel.columns for _, y in h.curve(c)]
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    if panel.scale == "log2":
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    elif panel.scale == "log" and min(values) > 0 and max(values) / min(values) > 20:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda y, _: f"{y:,.0f}" if abs(y) >= 1_000 else f"{y:.4g}")
        )
    if panel.columns == ("memory_fraction",):
        axes.set_ylim(0, 1)


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]
