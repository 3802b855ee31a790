"""Real gloo process groups, and a small problem to train on them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import nn

from ray_dynbs.core.lr import ScheduleProgress
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.training.columns import ColumnStore
from ray_dynbs.training.feed import IndexedFeed
from ray_dynbs.training.loop import TrainingLoop
from ray_dynbs.training.lr import Schedule
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.step import OptimizerStep
from ray_dynbs.training.world import World

# A fork server imports torch once, before any thread exists; every rank is forked from it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "tests.support"])


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90) -> list[Any]:
    """Call a function on every rank of a new gloo group; returns their results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        queue = CONTEXT.Queue()
        store = os.path.join(folder, "store")
        processes = [
            CONTEXT.Process(
                target=_rank, args=(function, args, rank, world_size, (store, queue)), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            results = dict(queue.get(timeout=timeout_s) for _ in processes)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
    failures = [result for result in results.values() if isinstance(result, _Failure)]
    if failures:
        raise AssertionError("\n".join(failure.text for failure in failures))
    return [results[rank] for rank in range(world_size)]


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _rank(function: Any, args: Any, rank: int, world_size: int, meeting: tuple[str, Any]) -> None:
    store, queue = meeting
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        result = function(*args)
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001  # handed to the parent, which raises it
        result = _Failure(f"rank {rank}: {traceback.format_exc()}")
    queue.put((rank, result))


def table(num_rows: int, *, seed: int = 0, width: int = 5) -> pa.Table:
    """Rows with their own number, inputs and a target."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(num_rows, width))
    target = np.sin(inputs).sum(axis=1)
    flat = pa.array(inputs.reshape(-1))
    return pa.table(
        {
            "row": pa.array(np.arange(num_rows)),
            "x": pa.FixedSizeListArray.from_arrays(flat, width),
            "y": pa.array(target),
        }
    )


def split_table(whole: pa.Table, cuts: list[int]) -> list[pa.Table]:
    """The same rows in blocks that end at these rows; empty blocks allowed."""
    edges = [0, *sorted(cuts), whole.num_rows]
    return [whole.slice(a, b - a) for a, b in pairwise(edges)]


def small_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)


def squared_error(model: nn.Module) -> Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, int]]:
    """Loss sum and weight of a micro-batch."""

    def loss(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        dtype = next(model.parameters()).dtype
        error = model(batch["x"].to(dtype)).squeeze(1) - batch["y"].to(dtype)
        return (error**2).sum(), len(error)

    return loss


def training_loop(
    whole: pa.Table,
    plan: BatchPlan,
    *,
    dtype: torch.dtype = torch.float64,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9
    ),
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    reference: int | None = None,
    shuffle: Any = "full",
    clip_grad_norm: float | None = None,
    make_model: Callable[[], nn.Module] | None = None,
) -> tuple[nn.Module, TrainingLoop]:
    """This rank's loop over a small regression problem, in the current process group."""
    world = World.current()
    model = make_model() if make_model else small_model(dtype)
    optimizer = make_optimizer(model.parameters())
    precision = MixedPrecision("fp64" if dtype == torch.float64 else "fp32", world.device)
    progress = ScheduleProgress(whole.num_rows, reference or plan.global_batch_size)
    loop = TrainingLoop(
        model=model,
        step=OptimizerStep(model, optimizer, world, precision, clip_grad_norm=clip_grad_norm),
        schedules=[Schedule(make_scheduler(optimizer) if make_scheduler else None, progress)],
        feed=IndexedFeed(
            ColumnStore([whole]), rank=world.rank, plan=plan, seed=1, shuffle=shuffle, device=world.device
        ),
        world=world,
    )
    return model, loop


def flat_weights(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().numpy()
