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
from ray_dynbs.core.probed import ProbeResult, SizeTried
from ray_dynbs.core.recommend import Measured, recommend
from ray_dynbs.core.units import gib
from ray_dynbs.report.probe import draw_probe
from ray_dynbs.tasks.preflight import Preflight, preflight

if TYPE_CHECKING:
    from ray_dynbs.cluster.probing import ProbeReport

VISIBLE = 0.01
"""Part of the memory that rows have to take for a line through the peaks to be more than scatter."""


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

    typer.echo("probing: some steps at each of several sizes", err=True)
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
        fills_memory=report.result.limit == "memory",
        knee=report.result.knee,
        noise_scale=report.noise_scale,
        class_floor=_class_floor(config),
        initial=config.batch.initial,
        bounds=(config.batch.min, config.batch.max),
        num_rows=data.num_rows["train"],
        world_size=report.world_size,
    )
    _print(measured, report)
    for doubt in report.result.doubts:
        typer.echo(f"warning: {doubt}", err=True)
    if plot is not None:
        plot.write_bytes(draw_probe(report.result, measured, config.name))
        typer.echo(plot)
    return DONE


def _class_floor(config: Config) -> int | None:
    floors = [guard.floor for guard in build_guards(config.guards) if isinstance(guard, ClassCoverage)]
    return max(floors, default=None)


def _marked(result: ProbeResult) -> list[tuple[SizeTried, str]]:
    """Sizes tried, the smallest first, each with what is to be said of it."""
    marked = []
    for tried in sorted(result.tried, key=lambda each: each.micro_batch_size):
        rows = tried.micro_batch_size
        marks = {
            "largest that fits": rows == result.largest and result.limit == "memory",
            "largest tried": rows == result.largest and result.limit != "memory",
            "knee: as fast as any": rows == result.knee,
            "surely faster than the largest": rows == result.fastest < result.largest,
            "failed": tried.failed,
            "out of memory": tried.fraction is None and not tried.failed,
            "in the headroom": tried.fraction is not None and not tried.fits,
        }
        marked.append((tried, ", ".join(words for words, holds in marks.items() if holds)))
    return marked


def _print(measured: Measured, report: ProbeReport) -> None:
    result, table = report.result, Table(box=None, header_style="bold")
    for name in ("micro-batch", "memory", "", "rows/s per worker"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for tried, said in _marked(result):
        memory = "-" if tried.peak_bytes is None else gib(tried.peak_bytes)
        part = "" if tried.fraction is None else f"{tried.fraction:.0%}"
        speed = "-" if tried.samples_per_s is None else f"{tried.samples_per_s:,.0f}"
        table.add_row(f"{tried.micro_batch_size:,}", memory, part, speed, said)
    wide_console().print(table)
    where = f"{report.world_size} x {report.device}"
    typer.echo(
        f"memory: the peak, others' included, of {gib(result.usable_bytes)} that may be used with headroom "
        f"left free, on {where}"
    )
    if result.headroom:
        typer.echo(f"  {result.headroom}")
    if result.line is not None and result.line[1] * result.largest > VISIBLE * result.usable_bytes:
        typer.echo(f"  about {gib(result.line[0])}, and {result.line[1] / 2**20:,.3g} MiB for each row")
    limit = {"memory": "no more fit", "time": "more would take too long to try", None: "no limit was met"}
    typer.echo(
        f"at most {measured.largest} rows in one forward ({limit[result.limit]}); speeds are of one step each"
    )
    if measured.class_floor is not None:
        typer.echo(f"class coverage: at least {measured.class_floor} rows in a batch")
    plan, reasons = recommend(measured)
    typer.echo(
        f"recommended: batch.initial {plan.global_batch_size}, micro-batches of at most "
        f"{plan.micro_batch_size} rows, {plan.grad_accum_steps} per step and worker"
    )
    for reason in reasons:
        typer.echo(f"  {reason}")
