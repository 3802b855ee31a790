"""The ranks of a trial: this process alone, or a group of actors in the trial's own placement group.

Ray Train's controller, started anew for every trial, takes half a minute, and its placement group outlives a
stopped trial unless the State API answers. Tune's own placement group of a trial ends with it, and with
``reuse_actors`` serves the next one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_dynbs.cluster.data import Blocks
from ray_dynbs.cluster.search.ensemble import Ensemble, EpochOfTrial
from ray_dynbs.cluster.setup import Stores, open_stores
from ray_dynbs.config import Config
from ray_dynbs.core.probed import ProbeResult
from ray_dynbs.training.world import World

Files = dict[str, bytes]
"""Relative path -> content."""
GATHER_S = 120.0


@dataclass(frozen=True)
class TrialInput:
    """What a trial trains on, and how.

    Attributes:
        blocks: Split -> its rows by reference, prepared once for all trials.
        num_seeds: Seeds of each trial.
        cpus: Of each rank.
        gpus: Of each rank; a fraction shares one.
        share: Fraction of a node's memory that is each rank's own, where it computes on CPUs.
    """

    blocks: dict[str, Blocks]
    num_seeds: int
    cpus: float
    gpus: float
    share: float = 1.0


class Group(Protocol):
    """All ranks of a trial, which may begin another one."""

    def begin(self, config: Config, folder: str, restored: str | None) -> int:
        """Build everything anew, at a checkpoint's place if there is one; returns the epochs trained."""

    def train_epoch(self) -> EpochOfTrial:
        """One epoch on all ranks."""

    def write_checkpoints(self, folder: str) -> None:
        """What :meth:`begin` goes on from."""

    def end(self) -> None:
        """Leave nothing behind."""


class Rank:
    """One rank, in whatever process it lives.

    Args:
        given: What to train on.
        size: Ranks of the trial.
    """

    def __init__(self, given: TrialInput, size: int = 1) -> None:
        self._given, self._size = given, size
        self._stores: tuple[tuple[object, ...], Stores] | None = None
        self._ensemble: Ensemble | None = None
        self._probes: dict[str, ProbeResult] = {}
        if size == 1:
            torch.set_num_threads(max(int(given.cpus), 1))

    def address(self) -> str:
        """Where the other ranks meet this one."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def join(self, address: str, rank: int) -> None:
        """Meet the other ranks."""
        torch.set_num_threads(max(int(self._given.cpus), 1))
        backend = "nccl" if self._given.gpus >= 1 else "gloo"  # several NCCL ranks cannot share a device
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=self._size)

    def begin(self, config: Config, folder: str, restored: Files | str | None) -> int:
        """Build everything anew; returns the epochs trained.

        Args:
            config: The trial's configuration.
            folder: Of the trial.
            restored: A folder of checkpoints, or what lies in it; ``None`` to begin from the beginning.
        """
        self._ensemble = None  # frees the last trial's tensors before the new ones come
        with _as_folder(restored) as checkpoints:
            self._ensemble = Ensemble(
                config,
                self._given.num_seeds,
                self._rows(config),
                World.current(self._device),
                folder=folder,
                restored=checkpoints,
                share=self._share,
                probes=self._probes,
            )
        return self._ensemble.epoch

    @property
    def _share(self) -> float:
        """Of the memory; of a GPU, no more than that can be had from now on."""
        if self._device.type != "cuda":
            return self._given.share
        if not 0 < self._given.gpus < 1:
            return 1.0
        torch.cuda.set_per_process_memory_fraction(self._given.gpus, self._device)
        return self._given.gpus

    def train_epoch(self) -> EpochOfTrial:
        """One epoch of every seed."""
        return self._begun.train_epoch()

    def write_checkpoints(self, folder: str) -> None:
        """Into a folder on this node."""
        self._begun.write_checkpoints(Path(folder))

    def checkpoint_files(self) -> Files:
        """The same as bytes, for a trial that runs on another node."""
        with tempfile.TemporaryDirectory() as folder:
            self.write_checkpoints(folder)
            paths = [path for path in Path(folder).rglob("*") if path.is_file()]
            return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    @property
    def _begun(self) -> Ensemble:
        if self._ensemble is None:
            raise RuntimeError("the trial has not begun")
        return self._ensemble

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda:0" if self._given.gpus and torch.cuda.is_available() else "cpu")

    def _rows(self, config: Config) -> Stores:
        """The rows, kept from trial to trial as long as they are read alike."""
        columns = config.data.columns
        key = (config.precision == "fp64", tuple(columns) if columns is not None else None)
        if self._stores is None or self._stores[0] != key:
            self._stores = key, open_stores(config, self._given.blocks)
        return self._stores[1]


class OneRank(Rank):
    """The trial's own process is the only rank."""

    def end(self) -> None:
        """Let go of what was trained."""
        self._ensemble = None


class RanksInActors:
    """A group of actors, one per rank, in the placement group that Tune made for the trial.

    Args:
        given: What to train on.
        size: Ranks.
    """

    def __init__(self, given: TrialInput, size: int) -> None:
        self._given, self._size = given, size
        self._ranks: list[Any] = []

    def begin(self, config: Config, folder: str, restored: str | None) -> int:
        """The same on all ranks; actors that are there already are used again."""
        files = None if restored is None else _files_of(Path(restored))
        if not self._ranks:
            self._start()
        return int(self._all("begin", config, folder, files)[0])

    def _start(self) -> None:
        actor: Any = ray.remote(max_restarts=0)(Rank)
        group: Any = ray.util.get_current_placement_group()
        for rank in range(self._size):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            options = {
                "num_cpus": self._given.cpus,
                "num_gpus": self._given.gpus,
                "scheduling_strategy": place,
            }
            self._ranks.append(actor.options(**options).remote(self._given, self._size))
        address = ray.get(self._ranks[0].address.remote(), timeout=GATHER_S)
        self._wait([each.join.remote(address, rank) for rank, each in enumerate(self._ranks)], GATHER_S)

    def train_epoch(self) -> EpochOfTrial:
        """One epoch on all ranks."""
        found: EpochOfTrial = self._all("train_epoch")[0]
        return found

    def write_checkpoints(self, folder: str) -> None:
        """Rank 0's, wherever it lives."""
        for name, content in ray.get(self._ranks[0].checkpoint_files.remote()).items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def end(self) -> None:
        """End the actors."""
        for each in self._ranks:
            ray.kill(each)
        self._ranks = []

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._wait([getattr(each, method).remote(*args) for each in self._ranks])

    def _wait(self, calls: list[Any], timeout_s: float | None = None) -> list[Any]:
        """Every rank's answer; the first error of any rank ends them all, for the others wait for it.

        Raises:
            TimeoutError: they did not all answer in time.
        """
        left = list(calls)
        try:
            while left:
                done, left = ray.wait(left, num_returns=1, timeout=timeout_s)
                if not done:
                    raise TimeoutError(f"{len(left)} of {len(calls)} ranks did not answer in {timeout_s:g} s")
                ray.get(done)
        except BaseException:
            self.end()
            raise
        return list(ray.get(calls))


@contextlib.contextmanager
def _as_folder(restored: Files | str | None) -> Iterator[Path | None]:
    if restored is None or isinstance(restored, str):
        yield None if restored is None else Path(restored)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, content in restored.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield Path(folder)


def _files_of(folder: Path) -> Files:
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found
