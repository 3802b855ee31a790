"""Write the report of a run into its directory."""

from __future__ import annotations

from collections.abc import Sequence

from ray_dynbs.report.history import read_history
from ray_dynbs.report.page import render_page
from ray_dynbs.report.panels import draw_png
from ray_dynbs.report.tensorboard import write_events
from ray_dynbs.storage.run_directory import RunDirectory

PAGE, PICTURE = "report.html", "report.png"


def write_report(run: RunDirectory, others: Sequence[RunDirectory] = ()) -> list[str]:
    """Write ``report.html``, ``report.png`` and TensorBoard events, or a page and picture comparing runs.

    Args:
        run: The run, in whose directory they are written.
        others: Runs to show beside it; the files are then named ``compare.html`` and ``compare.png``.

    Returns:
        Where they are.

    Raises:
        ConfigError: a directory that holds no run, or a run without a finished epoch.
    """
    histories = [read_history(each) for each in (run, *others)]
    page, picture = ("compare.html", "compare.png") if others else (PAGE, PICTURE)
    run.write_text(page, render_page(histories))
    run.write_bytes(picture, draw_png(histories))
    if not others:
        write_events(run, histories[0])
    return [f"{run.uri}/{page}", f"{run.uri}/{picture}"]
