"""A failed run told to its user: the cause first, in one line, then the workers' tracebacks."""

from __future__ import annotations

import typer

from ray_dynbs.cluster.lost import is_consequence
from ray_dynbs.core.errors import ConfigError


def report_failure(error: BaseException) -> None:
    """Print a run's failure to standard error.

    Args:
        error: What Ray Train or Ray raised.
    """
    rank, cause = _first_cause(error)
    where = "" if rank is None else f" (worker {rank})"
    line = " ".join(str(cause).split()) or "no message"
    typer.echo(f"error{where}: {type(cause).__name__}: {line[:500]}", err=True)
    if not isinstance(cause, ConfigError):  # that one says all there is to say
        typer.echo(str(error), err=True)


def _first_cause(error: BaseException) -> tuple[int | None, BaseException]:
    """The failure that is not merely another worker's missing answer."""
    failures: dict[int, BaseException] = getattr(error, "worker_failures", None) or {}
    if not failures:
        return None, getattr(error, "controller_failure", error)
    causes = {rank: _own(e) for rank, e in failures.items()}
    own = {rank: e for rank, e in causes.items() if not is_consequence(e)}
    return min((own or causes).items(), key=lambda item: item[0])


def _own(failure: BaseException) -> BaseException:
    """The exception that the user's code raised, without what Ray Train and a Ray call put around it."""
    own = getattr(failure, "_base_exc", failure)
    cause = getattr(own, "cause", None)
    return cause if isinstance(cause, BaseException) else own
