"""``ray-dynbs probe``: a table of micro-batch sizes, and the sizes recommended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from ray_dynbs.cli.exits import DONE, FAILED, INTERRUPTED
from ray_dynbs.cli.failure import report_failure
from ray_dynbs.cli.wide import wide_console
from ray_dynbs.cluster.session import ray_session
from ray_dynbs.config import Config
from ray_dynbs.config.components import build_guards
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.guards import ClassCoverage
from ray_dynbs.core.recommend import Measured, recommend
from ray_dynbs.report.probe import Point, draw_probe
from ray_dynbs.tasks.preflight import Preflight, preflight

if TYPE_CHECKING:
    from ray_dynbs.cluster.probing import ProbeReport


def probe_command(config: Config, *, plot: Path | None, verbose: bool) -> int:
    """Probe, print, and return the exit code.

    Args:
        config: The configuration.
        plot: Where to draw it, if anywhere.
        verbose: Show Ray's own output too.

    Raises:
        ConfigError: the input is wrong.
    """
    if plot is not None and not plot.absolute().parent.is_dir():
        raise ConfigError(f"--plot {plot}: {plot.absolute().parent} is no folder; allowed: a file in one")
    found = preflight(config)
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)
    with ray_session(config.cluster.address, verbose=verbose):
        return _probe(config, found, plot)


def _probe(config: Config, found: Preflight, plot: Path | None) -> int:
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    from ray_dynbs.cluster.classes import with_class_counts
    from ray_dynbs.cluster.data import prepare_run
    from ray_dynbs.cluster.probing import run_probe

    data = prepare_run(config, found)
    config = with_class_counts(config, data.blocks["train"])
    try:
        report = run_probe(config, data)
    except (TrainingFailedError, RayError) as error:
        report_failure(error)
        return FAILED
    except (KeyboardInterrupt, SystemExit):
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    measured = Measured(
        largest=report.result.largest,
        knee=report.result.knee,
        noise_scale=report.noise_scale,
        class_floor=_class_floor(config),
        initial=config.batch.initial,
        bounds=(config.batch.min, config.batch.max),
        num_rows=data.num_rows["train"],
        world_size=report.world_size,
    )
    points = _points(report)
    _print(points, measured, report)
    for doubt in report.result.doubts:
        typer.echo(f"warning: {doubt}", err=True)
    if plot is not None:
        plot.write_bytes(draw_probe(points, measured, config.name))
        typer.echo(plot)
    return DONE


def _class_floor(config: Config) -> int | None:
    floors = [guard.floor for guard in build_guards(config.guards) if isinstance(guard, ClassCoverage)]
    return max(floors, default=None)


def _points(report: ProbeReport) -> list[Point]:
    """Sizes tried, the smallest first, each with what is to be said of it."""
    result = report.result
    points = []
    for tried in sorted(result.tried, key=lambda each: each.micro_batch_size):
        marks = {
            "largest that fits": tried.micro_batch_size == result.largest,
            "knee: as fast as any": tried.micro_batch_size == result.knee,
            "out of memory": tried.fraction is None,
            "in the headroom": tried.fraction is not None and tried.fraction > 1,
        }
        said = ", ".join(words for words, holds in marks.items() if holds)
        points.append(Point(tried.micro_batch_size, tried.fraction, tried.samples_per_s, said))
    return points


def _print(points: list[Point], measured: Measured, report: ProbeReport) -> None:
    table = Table(box=None, header_style="bold")
    for name in ("micro-batch", "memory", "rows/s per worker"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for point in points:
        memory = "-" if point.fraction is None else f"{point.fraction:.0%}"
        speed = "-" if point.samples_per_s is None else f"{point.samples_per_s:,.0f}"
        table.add_row(f"{point.rows:,}", memory, speed, point.said)
    wide_console().print(table)
    where = f"{report.world_size} x {report.device}"
    limit = "no more fit" if report.result.is_limited else "no limit was met"
    typer.echo(f"memory: the peak over what may be used, headroom left free, on {where}")
    typer.echo(f"at most {measured.largest} rows in one forward ({limit}); speeds are of one step each")
    if measured.class_floor is not None:
        typer.echo(f"class coverage: at least {measured.class_floor} rows in a batch")
    plan, reasons = recommend(measured)
    typer.echo(
        f"recommended: batch.initial {plan.global_batch_size}, micro-batches of {plan.micro_batch_size} "
        f"rows, {plan.grad_accum_steps} per step and worker"
    )
    for reason in reasons:
        typer.echo(f"  {reason}")
