"""``ray-dynbs submit``: a run or a search as a job of a cluster, followed from here."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ray_dynbs.cli.exits import DONE, FAILED, INTERRUPTED
from ray_dynbs.cli.resume import NEWEST
from ray_dynbs.cluster.jobs import Jobs, new_job
from ray_dynbs.cluster.package import inside, make_package
from ray_dynbs.config import Config, load_config
from ray_dynbs.config.load import read_yaml
from ray_dynbs.config.search import Candidates, load_search
from ray_dynbs.core.errors import ConfigError

KINDS = ("train", "tune", "probe")


@dataclass(frozen=True)
class Submission:
    """What to submit, and how.

    Attributes:
        words: ``[train|tune|probe] CONFIG``.
        overrides: ``key=value`` of its file.
        out: As ``--out`` of the command, on the cluster.
        resume: As ``--resume`` of the command, on the cluster.
        folder: What is sent.
        runtime_env: A YAML file with more of Ray's runtime environment.
        verbose: As ``--verbose`` of the command.
    """

    words: Sequence[str]
    overrides: Sequence[str]
    out: str | None
    resume: str | None
    folder: Path
    runtime_env: Path | None
    verbose: bool

    def command(self, path: str) -> list[str]:
        """The command that the job runs, in its copy of the folder."""
        arguments = [*self.kind_and_path[:1], path, *(f"--set={each}" for each in self.overrides)]
        if self.out is not None:
            arguments.append(f"--out={self.out}")
        if self.resume is not None:
            arguments += ["--resume"] if self.resume == NEWEST else [f"--resume={self.resume}"]
        if self.verbose:
            arguments.append("--verbose")
        return ["python", "-m", "ray_dynbs", *arguments]

    @property
    def kind_and_path(self) -> tuple[str, str]:
        """The command's name and its file.

        Raises:
            ConfigError: the words are others.
        """
        if len(self.words) == 1 and self.words[0] not in KINDS:
            return KINDS[0], self.words[0]
        if len(self.words) == 2 and self.words[0] in KINDS:
            return self.words[0], self.words[1]
        raise ConfigError(f"submit {' '.join(self.words)}: allowed: submit [{'|'.join(KINDS)}] CONFIG")


def submit_command(given: Submission, *, address: str | None, wait: bool) -> int:
    """Check, pack, submit, follow, and return the exit code of the job.

    Args:
        given: What to submit.
        address: The job server, or ``None`` for that of the environment.
        wait: Follow the job until it ends.

    Raises:
        ConfigError: the input is wrong; nothing has been submitted then.
        KeyboardInterrupt: while it was being submitted; it is stopped, if it got as far as to exist.
    """
    kind, file = given.kind_and_path
    if kind == "probe" and (given.out is not None or given.resume is not None):
        raise ConfigError("submit probe: --out or --resume is given; allowed with train and tune")
    path = Path(file)
    base, needed = _read(kind, path, given.overrides)
    package = make_package(given.folder, [path, *needed, *_local_data(base, given.folder)])
    runtime_env = _runtime_env(given.runtime_env)
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    if not address:
        raise ConfigError(
            "--address is missing; allowed: the job server, http://HOST:8265, or RAY_API_SERVER_ADDRESS"
        )
    jobs = Jobs(address)
    where = inside(package.folder, path).relative_to(package.folder).as_posix()
    behind = f", left out: {', '.join(package.left_out)}" if package.left_out else ""
    typer.echo(
        f"sending {len(package.files)} files, {package.num_bytes / 2**20:.1f} MB of {package.folder}{behind}"
    )
    name = path.stem if kind == "tune" else base.name
    job = new_job(name)
    typer.echo(f"job {job} at {jobs.address}")
    try:
        jobs.submit(job, given.command(where), package, runtime_env)
    except KeyboardInterrupt:
        with contextlib.suppress(ConnectionError):  # it may not have got as far as to exist
            jobs.stop(job)
        raise
    return _follow(jobs, job) if wait else DONE


def _read(kind: str, path: Path, overrides: Sequence[str]) -> tuple[Config, list[Path]]:
    """The configuration, checked here as far as it can be, and the files it is made of."""
    if kind != "tune":
        return load_config(path, overrides), []
    search, folder = load_search(path, overrides)
    needed = [folder / search.base] if isinstance(search.base, str) else []
    return Candidates(search, folder).base, needed


def _local_data(config: Config, folder: Path) -> list[Path]:
    """Data in the folder that is sent: it goes along, whatever the ignore files say."""
    named: list[Any] = []
    for split in (config.data.train, config.data.validation):
        named += split if isinstance(split, list) else [split]
    paths = [Path(each) for each in named if isinstance(each, str) and "://" not in each]
    return [folder / path for path in paths if not path.is_absolute() and (folder / path).exists()]


def _runtime_env(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    found = read_yaml(path)
    if "working_dir" in found:
        raise ConfigError(f"{path}: working_dir is set; allowed: --working-dir, the folder that is packed")
    return found


def _follow(jobs: Jobs, job: str) -> int:
    """Show what the job prints; Ctrl-C stops it, and its last words are still shown."""
    code, asked = None, False
    while code is None:
        try:
            with _sigterm_as_ctrl_c():
                if asked:
                    jobs.stop(job)
                code = jobs.follow(job, _show)
        except KeyboardInterrupt:
            if asked:  # twice: do not wait for it
                typer.echo(f"{job} is being stopped", err=True)
                return INTERRUPTED
            typer.echo(f"stopping {job}; Ctrl-C again leaves it to itself", err=True)
            asked = True
        except ConnectionError as error:
            typer.echo(f"error: {error}", err=True)
            return FAILED
    with contextlib.suppress(ConnectionError):
        why = jobs.why(job)
        if why:
            typer.echo(f"error: {job}: {why}", err=True)
    return code


def _show(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
