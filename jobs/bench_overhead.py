"""What deciding costs: a decision, a call to the coordinator, gradient statistics, an epoch's fixed cost.

``python jobs/bench_overhead.py [--quick] [--json FILE]``. The fixed cost of an epoch is its whole time
on two workers when there is next to nothing to train (4 rows, one step): feed, decision, checkpoint of a
small model and report. The baseline does the same with Ray's own means (a data shard read by
``iter_torch_batches``, a checkpoint, ``train.report``, Ray's default settings), in alternation with ours.
Gradient statistics: steps with and without them alternate, on two gloo ranks with 64 rows each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs.figures import show
from ray_dynbs import DynamicBatchSizeManager
from ray_dynbs.cluster.session import DRIVER_SETTINGS, ray_session
from ray_dynbs.config import Config
from ray_dynbs.core.signal import Signal

INTERVAL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
RAYS_DEFAULT_S = "2.0"
WARM_UP = 3
CONFIG = {
    "name": "overhead",
    "task": "ray_dynbs.tasks.tabular",
    "task_args": {"num_classes": 2, "hidden": [64]},
    "optimizer": {"name": "adam", "lr": 0.001},
    "data": {"features": ["a"], "label": "y"},
    "batch": {"initial": 8},
    "cluster": {"num_workers": 2},
}


class Sketch:
    """The well-known starting idea: two rules, no reasons, no record."""

    def __init__(self) -> None:
        self.size = 16

    def update_batch_size(self, grad_norm: float, memory_usage: float) -> int:
        if grad_norm > 10:
            self.size = max(8, self.size // 2)
        elif grad_norm < 0.1:
            self.size = min(512, self.size * 2)
        if memory_usage > 0.8:
            self.size = max(8, self.size // 2)
        return self.size


def per_call_us(function: Any, calls: int) -> float:
    started = time.perf_counter()
    for index in range(calls):
        function(0.05 if index % 2 else 20.0, 0.3)
    return (time.perf_counter() - started) / calls * 1e6


def decisions(repeats: int) -> dict[str, Any]:
    """The manager alone, in the form the coordinator uses it."""
    ours, baseline = [], []
    for _ in range(repeats):
        manager = DynamicBatchSizeManager(16)
        ours.append(per_call_us(manager.update_batch_size, 2_000))
        baseline.append(per_call_us(Sketch().update_batch_size, 2_000))
    return case("decision, manager alone", "us_per_decision", ours, baseline, "sketch: two rules, no record")


def round_trips(repeats: int) -> dict[str, Any]:
    """A decision through the actor and back, journal written."""
    import ray

    from ray_dynbs.cluster.coordinator import DecisionRequest, start_coordinator
    from ray_dynbs.storage.run_directory import RunDirectory

    class Echo:
        def call(self, value: Any) -> Any:
            return value

    config = Config.model_validate({**CONFIG, "epochs": 1})
    with tempfile.TemporaryDirectory() as folder:
        coordinator = start_coordinator(config, RunDirectory.create(folder, "decisions"))
        echo: Any = ray.remote(num_cpus=0)(Echo).remote()
        reply = ray.get(coordinator.start.remote("bench", 2, 1000, None))
        ours, baseline = [], []
        for version in range(repeats + WARM_UP):
            signal = Signal.measured(plan_version=version, num_steps=1, num_finite_steps=1, grad_norm=1.0)
            request = DecisionRequest(reply.state, signal)
            started = time.perf_counter()
            reply = ray.get(coordinator.decide.remote(request))
            ours.append((time.perf_counter() - started) * 1e3)
            started = time.perf_counter()
            ray.get(echo.call.remote(request))
            baseline.append((time.perf_counter() - started) * 1e3)
        ray.kill(coordinator)
        ray.kill(echo)
    return case(
        "decision, there and back", "ms_per_decision", ours[WARM_UP:], baseline[WARM_UP:], "empty actor call"
    )


def timed_worker(loop_config: dict[str, Any]) -> dict[str, Any]:
    """Our worker, with the time of every epoch."""
    from ray_dynbs.cluster.worker import open_worker

    worker = open_worker(loop_config["input"])
    times = []
    for _ in range(loop_config["input"].config.epochs):
        started = time.perf_counter()
        worker.train_epoch()
        times.append(time.perf_counter() - started)
    return {"best": times, "epochs": len(times)}


def plain_worker(loop_config: dict[str, Any]) -> list[float]:
    """The same epoch by Ray's own means."""
    import ray.train
    import ray.train.torch
    import torch

    model = ray.train.torch.prepare_model(
        torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    )
    optimizer = torch.optim.Adam(model.parameters())
    shard, times = ray.train.get_dataset_shard("train"), []
    for _ in range(loop_config["epochs"]):
        started = time.perf_counter()
        for batch in shard.iter_torch_batches(batch_size=4):
            optimizer.zero_grad()
            scores = model(batch["a"].float()[:, None])
            torch.nn.functional.cross_entropy(scores, batch["y"]).backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save(model.module.state_dict(), Path(folder) / "model.pt")
                torch.save(optimizer.state_dict(), Path(folder) / "optimizer.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"loss": 0.0}, checkpoint=checkpoint)
        times.append(time.perf_counter() - started)
    return times


def epoch_of_ours(epochs: int, folder: str) -> list[float]:
    import ray.data

    from ray_dynbs.cluster.data import prepare_data
    from ray_dynbs.cluster.trainer import run_training
    from ray_dynbs.storage.run_directory import RunDirectory

    os.environ[INTERVAL] = DRIVER_SETTINGS[INTERVAL]
    config = Config.model_validate({**CONFIG, "epochs": epochs + WARM_UP})
    data = prepare_data({"train": ray.data.from_items(ROWS)}, config.data.columns)
    result: Any = run_training(config, RunDirectory.create(folder, "ours"), data, loop=timed_worker)
    return list(result.best[WARM_UP:])


def epoch_of_ray(epochs: int, folder: str) -> list[float]:
    import ray.data
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    os.environ[INTERVAL] = RAYS_DEFAULT_S  # said outright: the cluster's processes inherited ours
    trainer = TorchTrainer(
        plain_worker,
        train_loop_config={"epochs": epochs + WARM_UP},
        datasets={"train": ray.data.from_items(ROWS)},
        # Half a CPU each: with whole ones on two cores the data pipeline starves and the epoch hangs.
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name=f"plain-{time.time_ns()}",
            storage_path=folder,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result: Any = trainer.fit()
    return list(result.return_value[WARM_UP:])


def gradient_statistics(millions: int, repeats: int) -> dict[str, Any]:
    """Steps with every step's pieces measured, against steps without."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        arguments = (f"file://{folder}/store", millions, repeats, queue)
        ranks = [context.Process(target=timed_steps, args=(rank, *arguments)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        ours, baseline = queue.get(timeout=300)
        for rank in ranks:
            rank.join()
    title = f"a step with gradient statistics, {millions} M parameters"
    return case(title, "ms_per_step", ours, baseline, "the same step without")


def timed_steps(rank: int, store: str, millions: int, repeats: int, queue: Any) -> None:
    """One rank's steps on 64 rows; rank 0 hands in the times."""
    import torch
    import torch.distributed as dist

    from ray_dynbs.core.lr import Adjustment
    from ray_dynbs.training.precision import MixedPrecision
    from ray_dynbs.training.step import OptimizerStep
    from ray_dynbs.training.stopwatch import Stopwatch
    from ray_dynbs.training.world import World

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    width = int((millions * 1e6 / 4) ** 0.5)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    world = World.current()
    step = OptimizerStep(model, optimizer, world, MixedPrecision("fp32", world.device))
    rows, watch = torch.randn(64, width), Stopwatch(world.device)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * (repeats + WARM_UP)):
        dist.barrier()
        started = time.perf_counter()
        step.run(
            [rows],
            lambda batch: ((model(batch) ** 2).sum(), len(batch)),
            rows=128,
            adjustment=Adjustment(),
            measure="pieces" if number % 2 == 0 else None,
            stopwatch=watch,
        )
        times[number % 2].append((time.perf_counter() - started) * 1e3)
    if rank == 0:
        queue.put((times[0][WARM_UP:], times[1][WARM_UP:]))
    dist.barrier()
    dist.destroy_process_group()


ROWS = [{"a": float(i), "y": i % 2} for i in range(4)]


def epochs_fixed_cost(rounds: int, epochs: int) -> dict[str, Any]:
    ours: list[float] = []
    baseline: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            ours += epoch_of_ours(epochs, folder)
            baseline += epoch_of_ray(max(epochs // 3, 3), folder)
    name = "iter_torch_batches + train.report, defaults"
    return case("epoch's fixed cost, 2 workers", "s_per_epoch", ours, baseline, name)


def case(title: str, unit: str, ours: list[float], baseline: list[float], name: str) -> dict[str, Any]:
    return {
        "case": title,
        "unit": unit,
        "ours": statistics.median(ours),
        "baseline": statistics.median(baseline),
        "baseline_name": name,
        "ours_repeats": ours,
        "baseline_repeats": baseline,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="at most two minutes on two cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, repeats included")
    arguments = parser.parse_args()
    results = [decisions(3 if arguments.quick else 15)]
    results += [gradient_statistics(millions, 30 if arguments.quick else 100) for millions in (1, 10)]
    with ray_session(None):
        results.append(round_trips(30 if arguments.quick else 200))
        results.append(epochs_fixed_cost(*((1, 9) if arguments.quick else (3, 20))))
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
