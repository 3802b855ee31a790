"""Workers that come and go: a node dies, a node comes back, a cluster that is still too small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.cluster_utils import Cluster

from ray_dynbs.config import load_config
from ray_dynbs.core.journal import decode_lines, replay
from ray_dynbs.storage.run_directory import DECISIONS, RunDirectory
from tests.commands import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(480)]
NUM_ROWS, SIZES = 61, [9, 33, 2, 61, 17]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head of one CPU, whose workers find the tests' task; the driver is a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


def write(folder: Path, nodes: Cluster, epochs: int, **cluster: Any) -> str:
    config = {
        "name": "elastic",
        "task": "tests.problem_task",
        # About three seconds an epoch.
        "task_args": {"num_rows": NUM_ROWS, "validate": False, "sleep_s": 0.3},
        "epochs": epochs,
        "precision": "fp64",
        "optimizer": {"name": "sgd", "lr": 0.02},
        "batch": {"initial": 9, "min": 2, "max": 64},
        "policy": {"name": "tests.problem_task.alternate", "sizes": SIZES[1:] + SIZES[:1]},
        "guards": [],
        "lr": {"rule": "linear"},
        "cluster": {"address": nodes.address, **cluster},
    }
    (folder / "elastic.yaml").write_text(yaml.safe_dump(config))
    return "elastic.yaml"


def test_a_lost_node_and_one_that_comes_back(start: Any, tmp_path: Path, nodes: Cluster) -> None:
    """Two workers, one, two again: every epoch's rows and sizes are those of an undisturbed run."""
    second = nodes.add_node(num_cpus=1)
    command = start("train", write(tmp_path, nodes, 40, num_workers=[1, 2]))
    command.wait_for("size 2")
    nodes.remove_node(second, allow_graceful=False)
    command.wait_for("note: the workers were restarted")
    nodes.add_node(num_cpus=1)
    assert command.wait(400) == 0, command.text
    run = RunDirectory.open(str(tmp_path / "runs" / "elastic"))
    rows = run.read_epochs()
    history = {row["epoch"]: row for row in rows}
    assert [history[e]["global_batch_size"] for e in range(40)] == [SIZES[e % 5] for e in range(40)]
    assert [history[e]["rows"] for e in range(40)] == [NUM_ROWS] * 40
    assert [history[e]["lr_scale"] for e in range(40)] == [SIZES[e % 5] / 9 for e in range(40)]
    workers = [history[e]["world_size"] for e in range(40)]
    assert list(dict.fromkeys(workers)) == [2, 1]
    assert workers[-1] == 2, workers
    config = load_config(Path(run.absolute_uri) / "config.yaml")
    assert replay(decode_lines(run.read_text(DECISIONS)), config.make_manager) == []
    assert command.survivors() == []


def test_waiting_for_a_cluster_to_grow_only_if_told_to(start: Any, tmp_path: Path, nodes: Cluster) -> None:
    two = {"num_workers": 2, "resources_per_worker": {"CPU": 1.0}}
    refused = start("train", write(tmp_path, nodes, 2, **two))
    assert refused.wait(90) == 2, refused.text
    assert refused.text == (
        "error: cluster.num_workers is 2: they need 2 CPU, the cluster has 1; cluster.wait: true waits for "
        "it to grow\n"
    )
    waiting = start("train", write(tmp_path, nodes, 2, **two, wait=True))
    waiting.wait_for("next")
    nodes.add_node(num_cpus=1)
    assert waiting.wait(200) == 0, waiting.text
    rows = RunDirectory.open(str(tmp_path / "runs" / "elastic")).read_epochs()
    assert [row["world_size"] for row in rows] == [2, 2]
