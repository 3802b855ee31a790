"""``ray-dynbs tune``: a search, one line per trial that ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
import yaml

from ray_dynbs.cli.exits import DONE, FAILED, INTERRUPTED
from ray_dynbs.cli.resume import NEWEST
from ray_dynbs.cluster.session import ray_session
from ray_dynbs.config.load import dump_yaml, parse_yaml
from ray_dynbs.config.search import Candidates, Search, load_search, parse_search
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.report.events import RUN, TRIAL, tell
from ray_dynbs.report.trials import TrialLines, trial_line
from ray_dynbs.storage.run_directory import CONFIG, RunDirectory, check_writable, lasting
from ray_dynbs.storage.search_directory import BEST, SEARCH_PAGE, TRIALS, write_trials
from ray_dynbs.tasks.preflight import Preflight, preflight

if TYPE_CHECKING:
    from ray_dynbs.cluster.search.record import TrialRecord


def tune_command(
    path: Path,
    overrides: Sequence[str],
    *,
    out: str | None,
    resume: str | None,
    verbose: bool,
    events: bool = False,
) -> int:
    """Search, print, and return the exit code.

    Args:
        path: The search's YAML file.
        overrides: ``key=value`` of that file.
        out: Where to put the search's directory, instead of the file's ``out``.
        resume: A search's directory to go on with, ``newest`` for the newest of this name, or ``None``.
        verbose: Show Ray's own output too.
        events: Print trials for a program that follows them, and end with it.

    Raises:
        ConfigError: the input is wrong; nothing has been written then.
    """
    search, folder = load_search(path, overrides)
    search = search.model_copy(update={"out": lasting(search.out if out is None else out)})
    record = None
    if resume is not None:
        record = (
            RunDirectory.newest(search.out, search.name)
            if resume == NEWEST
            else RunDirectory.open(lasting(resume))
        )
        search, folder = _recorded(record)
        typer.echo(f"going on with {record.uri}, as it was recorded there")
    candidates = Candidates(search, folder)
    found = preflight(candidates.base)
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)
    _check_what_torch_knows(candidates, found)
    check_writable(search.out)
    with ray_session(candidates.base.cluster.address, verbose=verbose):
        return _search(candidates, found, record, events=events)


def _check_what_torch_knows(candidates: Candidates, base: Preflight) -> None:
    """See that the optimizer, the scheduler and the task take the keys that the space has for them.

    Raises:
        ConfigError: with none of a key's values they do.
    """
    for key, domain in candidates.search.space.items():
        if key.partition(".")[0] not in ("optimizer", "scheduler", "task_args"):
            continue
        complaints = []
        for value in domain.values:
            try:
                rows = preflight(candidates.at({**domain.example(), key: value}, "space")).rows
            except ConfigError as error:
                complaints.append(str(error))
                continue
            if rows != base.rows:
                raise ConfigError(
                    f"space: {key} {value!r} makes {rows} rows of data, the base has {base.rows}; allowed: "
                    "keys that leave the data alone, which all trials share"
                )
        if len(complaints) == len(domain.values):
            raise ConfigError(f"space: {key}: {complaints[0]}")


def _recorded(record: RunDirectory) -> tuple[Search, Path]:
    """A search as its directory holds it.

    Raises:
        ConfigError: the directory is that of a run.
    """
    data = parse_yaml(record.read_text(CONFIG))
    if not isinstance(data, dict) or "space" not in data:
        raise ConfigError(f"--resume {record.uri}: a run's directory, not a search's")
    return parse_search(data, f"{record.uri}/{CONFIG}"), Path()  # its base is written out


def _search(candidates: Candidates, found: Preflight, record: RunDirectory | None, *, events: bool) -> int:
    from ray_dynbs.cluster.data import prepare_run
    from ray_dynbs.cluster.search.driver import check_room, plan_search, run_search
    from ray_dynbs.cluster.search.record import table_row

    base, search = candidates.base, candidates.search
    check_room(candidates)
    data = prepare_run(base, found)
    plan = plan_search(candidates, data) if record is None else None
    if record is None:
        record = RunDirectory.create(search.out, search.name)
        record.write_text(CONFIG, yaml.safe_dump(candidates.recorded(), sort_keys=False, allow_unicode=True))
    typer.echo(f"search {record.uri}: {data.num_rows['train']} rows, {_workers(candidates)} per trial")
    view = TrialLines(typer.echo, candidates.base.metric.name, _cost(candidates))
    if events:
        tell(RUN, uri=record.absolute_uri)

    def show(ended: TrialRecord) -> None:
        if events:
            tell(TRIAL, row=table_row(ended))
        else:
            view.show(table_row(ended))

    try:
        records = run_search(candidates, data, record, show, plan)
    except (KeyboardInterrupt, SystemExit):
        where = f"; go on with: ray-dynbs tune {record.uri}/{CONFIG} --resume {record.uri}"
        typer.echo(f"interrupted{where}", err=True)
        return INTERRUPTED
    return _finish(candidates, record, records)


def _workers(candidates: Candidates) -> str:
    workers, seeds = candidates.base.cluster.worker_range[0], candidates.search.seeds
    return f"{workers} worker{'s' * (workers > 1)}, {seeds} seed{'s' * (seeds > 1)}"


def _finish(candidates: Candidates, folder: RunDirectory, records: list[TrialRecord]) -> int:
    """Write what was found, and say what is best."""
    from ray_dynbs.cluster.search.record import rank, table_row
    from ray_dynbs.report.search import write_search_report

    best = rank(records, candidates)
    ranked = [*best, *(record for record in records if record not in best)]
    write_trials(folder, [table_row(record) for record in ranked])
    failed = [record for record in records if record.status == "failed"]
    if not best:
        typer.echo(f"error: {_why_nothing(records, candidates)}", err=True)
        return FAILED
    config = candidates.at(best[0].point)
    named = config.model_copy(update={"name": f"{config.name}-best"})
    folder.write_text(BEST, dump_yaml(named))
    write_search_report(folder, best[0].trial)
    typer.echo(f"best: {trial_line(table_row(best[0]), candidates.base.metric.name, _cost(candidates))}")
    failures = f"; {len(failed)} failed" if failed else ""
    typer.echo(f"done: {len(records)} trials{failures}; {folder.uri}/{BEST}, {TRIALS}, {SEARCH_PAGE}")
    return DONE


def _why_nothing(records: list[TrialRecord], candidates: Candidates) -> str:
    """Why no trial came to anything."""
    failed = [record for record in records if record.status == "failed"]
    if failed and len(failed) == len(records):
        return f"all {len(records)} trials failed; the first: {failed[0].error}"
    if failed:
        return f"{len(failed)} of {len(records)} trials failed, the others came to nothing: {failed[0].error}"
    if any(record.results for record in records):
        return f"no trial reported a finite {candidates.base.metric.name}"
    return f"no trial finished an epoch within time_budget_s ({candidates.search.time_budget_s})"


def _cost(candidates: Candidates) -> str | None:
    target = candidates.search.target
    return None if target is None else target.cost
