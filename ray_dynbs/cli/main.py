"""The ``ray-dynbs`` command: thin; everything it does can be done from Python."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ray_dynbs import __version__
from ray_dynbs.cli.exits import INTERRUPTED, WRONG_INPUT
from ray_dynbs.cli.resume import NEWEST
from ray_dynbs.config import load_config
from ray_dynbs.core.errors import ConfigError

# BadParameter -> UsageError -> ClickException: typer brings its own copy of click or uses the package,
# depending on its version, and this is the same class either way.
ClickException: type[Any] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Training jobs on Ray that choose their own batch size while they run.",
)
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="the run's YAML file")]
Events = Annotated[bool, typer.Option("--events", hidden=True, help="JSON lines, for a program")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one key; repeatable")
]


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option(help="folder or URI for run directories")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="[RUN]", help="go on with this run directory, or the newest of this name"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="show Ray's own output too")] = False,
    events: Events = False,
) -> None:
    """Train as CONFIG says."""
    from ray_dynbs.cli.train import train_command

    all_overrides = [*(overrides or ()), *([f"out={json.dumps(out)}"] if out is not None else ())]
    loaded = load_config(config, all_overrides)
    _follow_listener(events)
    raise typer.Exit(train_command(loaded, resume=resume, verbose=verbose, events=events))


@app.command()
def tune(
    search: Annotated[Path, typer.Argument(metavar="SEARCH", help="the search's YAML file")],
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option(help="folder or URI for the search's directory")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="[DIR]", help="go on with this search, or the newest of this name"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="show Ray's own output too")] = False,
    events: Events = False,
) -> None:
    """Search policy thresholds, LR rules or any other keys, as SEARCH says."""
    from ray_dynbs.cli.tune import tune_command

    _follow_listener(events)
    raise typer.Exit(
        tune_command(search, overrides or (), out=out, resume=resume, verbose=verbose, events=events)
    )


@app.command()
def submit(
    words: Annotated[
        list[str], typer.Argument(metavar="[train|tune|probe] CONFIG", help="what to run there")
    ],
    address: Annotated[
        str | None,
        typer.Option(help="the cluster's job server, http://HOST:8265 [RAY_API_SERVER_ADDRESS, RAY_ADDRESS]"),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        str | None, typer.Option(help="folder or URI on the cluster, for the run directory")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="[RUN]", help="go on with this run directory, or the newest of this name"),
    ] = None,
    working_dir: Annotated[Path, typer.Option(metavar="DIR", help="the folder to send")] = Path(),
    runtime_env: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML with Ray's runtime environment: pip, env_vars, ..."),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="submit only, and print the job's id")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="show Ray's own output too")] = False,
) -> None:
    """Run CONFIG as a job of a cluster; Ctrl-C stops it."""
    from ray_dynbs.cli.submit import Submission, submit_command

    given = Submission(words, overrides or (), out, resume, working_dir, runtime_env, verbose)
    raise typer.Exit(submit_command(given, address=address, wait=not no_wait))


@app.command()
def probe(
    config: ConfigPath,
    overrides: Overrides = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw it as a PNG")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="show Ray's own output too")] = False,
) -> None:
    """Find out what fits in memory, how fast it is and how noisy, on CONFIG's workers; recommends sizes."""
    from ray_dynbs.cli.probe import probe_command

    raise typer.Exit(probe_command(load_config(config, overrides or ()), plot=plot, verbose=verbose))


@app.command()
def check(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="the run's YAML file")] = None,
    overrides: Overrides = None,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="print every key, or those of the word in CONFIG's place"),
    ] = False,
    platform: Annotated[
        bool, typer.Option("--platform", help="print this machine's devices, memory, limits and precisions")
    ] = False,
) -> None:
    """Check CONFIG without training, or print all keys there are, or what this machine offers."""
    from ray_dynbs.cli.check import check_command, print_platform, print_schema

    if schema:
        print_schema(str(config) if config else "")
        return
    if platform:
        print_platform()
    elif config is None:
        raise ConfigError("check: CONFIG is missing (or ask for --schema, --platform)")
    if config is not None:
        check_command(load_config(config, overrides or ()))


@app.command()
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run directory")],
    compare: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="show this run beside it; repeatable")
    ] = None,
) -> None:
    """Write the report page and picture of RUN into its directory."""
    from ray_dynbs.report import write_report
    from ray_dynbs.storage.run_directory import RunDirectory

    runs = [RunDirectory.open(each) for each in (run, *(compare or ()))]
    for path in write_report(runs[0], runs[1:]):
        typer.echo(path)


@app.command()
def simulate(
    config: ConfigPath,
    overrides: Overrides = None,
    world: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=NUMBER", help="a key of the simulated world; repeatable; `help` lists them"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the measurements' noise")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw it as a PNG")] = None,
) -> None:
    """Run CONFIG's policy without training, through a world of given noise, speed and memory."""
    from ray_dynbs.cli.simulate import simulate_command

    simulate_command(load_config(config, overrides or ()), world=world or (), seed=seed, plot=plot)


@app.command()
def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run directory")],
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="what its policy, guards, batch and lr would have made of it"),
    ] = None,
) -> None:
    """Make the decisions of RUN again, bit for bit, or with another policy."""
    from ray_dynbs.cli.replay import replay_command
    from ray_dynbs.storage.run_directory import RunDirectory

    replay_command(RunDirectory.open(run), policy)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 the run failed, 2 wrong input, 130 interrupted."""
    # A task is usually a module beside the configuration; console scripts do not look there.
    # A task that uses Ray Data too early must not make Ray join whatever cluster it finds on this host.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        code = app(
            args=_name_the_newest(sys.argv[1:] if arguments is None else arguments), standalone_mode=False
        )
    except ConfigError as error:
        code = _complain(str(error))
    except ClickException as error:
        message = error.format_message()
        code = _complain(message) if message else WRONG_INPUT  # without arguments the help was shown
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    sys.exit(code or 0)


def _follow_listener(events: bool) -> None:
    if events:
        from ray_dynbs.report.events import end_with_listener

        end_with_listener()


def _name_the_newest(arguments: Sequence[str]) -> list[str]:
    """Give a ``--resume`` without a path the value it stands for: typer has no optional values."""
    named = list(arguments)
    for index, argument in reversed(list(enumerate(named))):
        following = named[index + 1] if index + 1 < len(named) else "-"
        if argument == "--resume" and (following.startswith("-") or following.endswith((".yaml", ".yml"))):
            named.insert(index + 1, NEWEST)
    return named


def _complain(message: str) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return WRONG_INPUT
