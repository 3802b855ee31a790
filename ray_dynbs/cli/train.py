"""``ray-dynbs train``: one line per epoch, one line per error."""

from __future__ import annotations

import typer

from ray_dynbs.cli.exits import DONE, FAILED, INTERRUPTED
from ray_dynbs.cli.failure import report_failure
from ray_dynbs.cli.resume import NEWEST, open_run
from ray_dynbs.cluster.session import ray_session
from ray_dynbs.config import Config
from ray_dynbs.config.load import dump_yaml
from ray_dynbs.report.events import RUN, EpochEvents, tell
from ray_dynbs.report.live import View, make_view
from ray_dynbs.storage.run_directory import (
    CHECKPOINTS,
    CONFIG,
    EARLIER_CONFIGS,
    RunDirectory,
    check_writable,
    in_job_folder,
    lasting,
)
from ray_dynbs.tasks.preflight import Preflight, preflight


def train_command(config: Config, *, resume: str | None, verbose: bool, events: bool = False) -> int:
    """Train, print, and return the exit code.

    Args:
        config: The configuration.
        resume: A run directory to go on with, ``newest`` for the newest of this name, or ``None``.
        verbose: Show Ray's own output too.
        events: Print epochs for a program that follows them, and end with it.

    Raises:
        ConfigError: the input is wrong; nothing has been written then.
    """
    found = preflight(config)
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)
    config = config.model_copy(update={"out": lasting(config.out)})
    check_writable(config.out)
    run = None
    if resume is not None:
        run, config = open_run(config, resume if resume == NEWEST else lasting(resume))
        done = max((row["epoch"] + 1 for row in run.read_epochs()), default=0)
        if done >= config.epochs:
            typer.echo(f"nothing left to do: {done} of {config.epochs} epochs are done; {run.uri}")
            tell(RUN, uri=run.absolute_uri) if events else None
            return DONE
    with ray_session(config.cluster.address, verbose=verbose):
        return _train(config, run, found, events=events)


def _train(config: Config, run: RunDirectory | None, found: Preflight, *, events: bool) -> int:
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    from ray_dynbs.cluster.classes import with_class_counts
    from ray_dynbs.cluster.data import prepare_run
    from ray_dynbs.cluster.trainer import crowded, run_training, scaling_config

    scaling_config(config)  # refuses what the cluster cannot place before anything is written
    data = prepare_run(config, found)
    config = with_class_counts(config, data.blocks["train"])
    if run is None:
        run = RunDirectory.create(config.out, config.name)
        if run.name != config.name:
            typer.echo(f"{config.name} exists already: this run is {run.name}", err=True)
    old_config, old_epochs = run.read_text(CONFIG), len(run.read_epochs())
    _replace_config(run, old_config, dump_yaml(config))
    typer.echo(f"run {run.uri}: {data.num_rows['train']} rows, {config.cluster.workers_text} workers")
    crowd = crowded(config)
    if crowd:
        typer.echo(f"warning: {crowd}", err=True)
    if found.about:
        typer.echo(found.about)
    view: View = make_view(config.metric.name, config.epochs, typer.echo)
    if events:
        tell(RUN, uri=run.absolute_uri)
        view = EpochEvents()
    try:
        with view:
            result = run_training(config, run, data, view.show)
    except (TrainingFailedError, RayError) as error:
        if _undo(run, old_config, old_epochs):
            _write_report(run)
        report_failure(error)
        return FAILED
    except (KeyboardInterrupt, SystemExit):
        kept = _undo(run, old_config, old_epochs)
        typer.echo(f"interrupted{_how_to_go_on(run)}" if kept else "interrupted", err=True)
        return INTERRUPTED
    _write_report(run)
    best = "" if result.best is None else f", best {config.metric.name} {result.best:.4f}"
    typer.echo(f"done: {result.epochs} epochs{best}; {run.uri}")
    return DONE


def _how_to_go_on(run: RunDirectory) -> str:
    """The command, whose configuration is the one of the run, overrides included."""
    if in_job_folder():  # where nobody sits
        return f"; go on with it by --resume (the newest of its name), or --resume={run.uri}"
    config = f"{run.uri}/{CONFIG}" if "://" not in run.uri else "CONFIG"
    return f"; go on with: ray-dynbs train {config} --resume {run.uri}"


def _replace_config(run: RunDirectory, old: str, new: str) -> None:
    """Write the configuration; the one before is kept for the replay of what was decided under it."""
    if old and old != new:
        incarnations = [decision.incarnation for decision in run.read_decisions()]
        run.write_text(f"{EARLIER_CONFIGS}/{max(incarnations, default=-1) + 1:06}.yaml", old)
    run.write_text(CONFIG, new)


def _undo(run: RunDirectory, old_config: str, old_epochs: int) -> bool:
    """After a run that got nowhere: its record is as it was, or gone; whether there is one left."""
    saved = any(name.startswith("epoch-") for name in run.names_in(CHECKPOINTS))
    if len(run.read_epochs()) > old_epochs or (saved and not old_config):
        return True
    if old_config:
        run.write_text(CONFIG, old_config)
        return True
    run.remove()
    typer.echo(f"nothing was saved yet: {run.uri} is removed", err=True)
    return False


def _write_report(run: RunDirectory) -> None:
    """The page beside the run; a run that has trained is not failed by its picture."""
    from ray_dynbs.report import write_report

    if not run.read_epochs():
        return
    try:
        write_report(run)
    except Exception as error:  # noqa: BLE001  # said, and the run's own record is complete
        typer.echo(f"warning: the report was not written: {type(error).__name__}: {error}", err=True)
