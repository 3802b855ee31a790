"""Going on with a run: which one, and what a changed configuration means for it."""

from __future__ import annotations

from typing import Any

import typer

from ray_dynbs.config import Config
from ray_dynbs.config.load import changed_keys, parse_yaml
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.storage.run_directory import CONFIG, RunDirectory

NEWEST = "newest"


def open_run(config: Config, resume: str) -> tuple[RunDirectory, Config]:
    """The run to go on with, and the configuration to go on with.

    The new configuration holds, but for what the checkpoint holds: the batch size reached, and the batch
    that the base LR belongs to. Every difference is said.

    Args:
        config: The configuration given now.
        resume: A run directory, or :data:`NEWEST` for the newest of this name.

    Raises:
        ConfigError: there is no such run, or it was trained with another task, optimizer or scheduler,
            whose state is in its checkpoint.
    """
    run = RunDirectory.newest(config.out, config.name) if resume == NEWEST else RunDirectory.open(resume)
    old = parse_yaml(run.read_text(CONFIG))
    if not isinstance(old, dict) or "task" not in old:
        raise ConfigError(f"--resume {run.uri}: holds no run of a configuration, which has a task")
    reference = config.lr.reference_batch_size or old["lr"]["reference_batch_size"] or old["batch"]["initial"]
    config = config.model_copy(
        update={"lr": config.lr.model_copy(update={"reference_batch_size": reference})}
    )
    config.check_rule()
    new = config.model_dump()
    if old.get("policy", {}).get("name") != new["policy"]["name"]:  # whose keys would be None
        old, new = ({**each, "policy": {"name": each["policy"]["name"]}} for each in (old, new))
    for key, was, now in changed_keys(old, new):
        if key.partition(".")[0] in ("task", "optimizer", "scheduler"):
            raise ConfigError(
                f"--resume: {key} was {was!r}, is now {now!r}; allowed: the same, since the checkpoint of "
                f"{run.uri} holds its state"
            )
        if key != "lr.reference_batch_size" or was is not None:
            typer.echo(f"resume: {key} was {was!r}, is now {now!r}; {_what_holds(key, was)}", err=True)
    return run, config


def _what_holds(key: str, was: Any) -> str:
    if key == "batch.initial":
        return f"the batch size reached holds, and the base LR stays that of a batch of {was}"
    return "the new one holds"
