"""A task for tests: a small regression whose loss writes down which rows it received.

``task_args``: ``num_rows``; ``blocks``, rows at which the data is cut; ``log``, a folder for the rows
received, or null; ``sleep_s`` at every micro-batch; ``fail_after_rows`` and ``kill_after_rows``: rank 0
raises, or rank 1 kills itself, after that many rows, as long as ``log`` holds no file named ``healed``.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray.data
import torch
import torch.distributed as dist

from ray_dynbs.config import Config
from tests.support import small_model, split_table, squared_error, table

_arguments: dict[str, Any] = {}
_calls = {"rows": 0}


def datasets(config: Config) -> dict[str, Any]:
    arguments = config.task_args
    whole = table(arguments["num_rows"])
    cuts = arguments.get("blocks", [])
    found = {"train": ray.data.from_arrow([b for b in split_table(whole, cuts) if b.num_rows])}
    if arguments.get("validate", True):
        found["validation"] = ray.data.from_arrow(table(23, seed=9))
    return found


def build_model(config: Config) -> torch.nn.Module:
    _arguments.update(config.task_args)
    _calls["rows"] = 0
    return small_model(seed=config.seed)


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    if model.training:
        time.sleep(_arguments.get("sleep_s", 0.0))
        _write_down(batch["row"].tolist())
    return squared_error(model)(batch)


def metrics(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"mean_square": squared_error(model)(batch)[0]}


def _write_down(rows: list[int]) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not _arguments.get("log"):
        return
    folder = Path(_arguments["log"])
    _calls["rows"] += len(rows)
    if not (folder / "healed").exists():
        if rank == 0 and _calls["rows"] > _arguments.get("fail_after_rows", math.inf):
            raise ZeroDivisionError("this worker was told to fail")
        if rank == 1 and _calls["rows"] > _arguments.get("kill_after_rows", math.inf):
            (folder / "healed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    with open(folder / f"rank-{rank}-{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(rows) + "\n")


class Alternate:
    """A policy that walks through given sizes, one per decision."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def init(self, plan: Any) -> int:
        return 0

    def update(self, proposal: Any, state: int, view: Any) -> tuple[Any, int]:
        size = self.sizes[state % len(self.sizes)]
        return proposal.because(f"size {state}", global_batch_size=size), state + 1


def alternate(sizes: list[int]) -> Alternate:
    return Alternate(sizes)


class Forgetful(Alternate):
    """Its state is nothing that JSON can hold."""

    def init(self, plan: Any) -> Any:
        return {1, 2}

    def update(self, proposal: Any, state: Any, view: Any) -> tuple[Any, Any]:
        return proposal, state


def forgetful() -> Forgetful:
    return Forgetful([8])


def explode() -> None:
    raise ZeroDivisionError("as a careless policy would")
