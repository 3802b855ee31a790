"""Runs that cannot go well end soon, with one line, and leave neither a process nor half a run directory."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from ray_dynbs.cli.main import main
from ray_dynbs.storage.run_directory import RunDirectory

pytestmark = [pytest.mark.timeout(300)]
PARTS = (
    "from ray_dynbs.tasks.tabular import build_model, loss, metrics\nfrom ray_dynbs.tasks import tabular\n"
)


def write(folder: Path, task: str, **keys: Any) -> str:
    """A task and its configuration over forty rows."""
    rows = {"a": [1.0, 2.0] * 20, "b": [1.5, 2.5] * 20, "y": [0, 1] * 20}
    for split in ("train", "validation"):
        pq.write_table(pa.table(rows), folder / f"{split}.parquet")
    (folder / "faulty.py").write_text(PARTS + task)
    config = {
        "task": "faulty",
        "task_args": {"num_classes": 2},
        "epochs": 2,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "data": {
            "train": "train.parquet",
            "validation": "validation.parquet",
            "features": ["a", "b"],
            "label": "y",
        },
        "batch": {"initial": 10, "min": 1},
        **keys,
    }
    path = folder / "faulty.yaml"
    path.write_text(yaml.safe_dump(config))
    return path.name


MEAN = (
    "def loss(model, batch):\n    total, rows = tabular.loss(model, batch)\n    return total / rows, rows\n"
)
BEFORE_TRAINING = {
    "a mean as loss": (MEAN, {}, "loss is .* on a batch.*: a mean; allowed: the sum over rows"),
    "a mean as metric": (
        "def metrics(model, batch):\n    return {'accuracy': 0.5}\n",
        {},
        "metric 'accuracy' is 0.5 on a batch, 0.5 and 0.5 on its halves: a mean",
    ),
    "no pair": (
        "def loss(model, batch):\n    return tabular.loss(model, batch)[0]\n",
        {},
        "loss returned Tensor of shape",
    ),
    "another metric": (
        "",
        {"metric": {"name": "accurracy", "mode": "max"}},
        "metric.name is 'accurracy'; the task reports accuracy, loss",
    ),
    "a column that is not there": (
        "def loss(model, batch):\n    return batch['label'].sum(), 1\n",
        {},
        "loss or metrics failed on the first rows, whose columns are a, b, y: KeyError: 'label'",
    ),
}


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("case", BEFORE_TRAINING)
def test_what_a_few_rows_show_is_found_before_ray_starts(
    case: str,
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, keys, words = BEFORE_TRAINING[case]
    config = write(tmp_path, task, **keys)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    with pytest.raises(SystemExit) as caught:
        main([command, config])
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    shown = capsys.readouterr()
    assert caught.value.code == 2
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert re.search(words, shown.err), shown.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.ray
def test_a_pipeline_that_gives_no_rows_ends_the_wait(start: Any, tmp_path: Path) -> None:
    """The watchdog: within the time given, with what the cluster has; nothing is left."""
    hanging = (
        "def datasets(config):\n    import time, ray.data\n"
        "    return {'train': ray.data.range(40).map(lambda row: time.sleep(3600))}\n"
    )
    config = write(tmp_path, hanging, data={"features": ["a", "b"], "label": "y", "timeout_s": 4.0})
    command = start("train", config)
    assert command.wait(90) == 2, command.text
    assert command.text.startswith("error: train data: no rows came within 4 s (timeout_s)")
    assert re.search(r"the cluster, which has \S+ of \d+ CPU free, or for itself", command.text)
    assert command.text.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    assert command.survivors() == []


NAN = (
    "steps = 0\n"
    "def loss(model, batch):\n"
    "    global steps\n"
    "    total, rows = tabular.loss(model, batch)\n"
    "    steps += model.training\n"
    "    return total * (float('nan') if steps == 6 and model.training else 1.0), rows\n"
)


@pytest.mark.slow
@pytest.mark.ray
def test_a_loss_that_is_not_finite_ends_the_run(start: Any, tmp_path: Path) -> None:
    """In the sixth step, of the second epoch: it is named, and the first epoch is on record."""
    policy = {"name": "threshold", "grad_norm_low": 1e6, "grad_norm_high": 1e9}
    config = write(
        tmp_path,
        NAN,
        epochs=3,
        policy=policy,
        guards=[],
        batch={"initial": 10},
        memory={"probe": "off"},  # the task counts its calls
    )
    command = start("train", config)
    code = command.wait(120)
    epochs = RunDirectory.open(str(tmp_path / "runs" / "faulty")).read_epochs()
    assert code == 1
    assert "FloatingPointError: loss or gradient was not finite in step 6 (epoch 1)" in command.text
    assert len(epochs) == 1
    assert command.survivors() == []


@pytest.mark.slow
@pytest.mark.ray
def test_a_mean_that_only_training_shows_leaves_nothing_behind(start: Any, tmp_path: Path) -> None:
    """The rows come from a pipeline, so the loss is tried in the first step."""
    piped = (
        "def datasets(config):\n    import ray.data\n"
        "    return {'train': ray.data.read_parquet('train.parquet')}\n"
    )
    config = write(tmp_path, MEAN + piped, data={"features": ["a", "b"], "label": "y"})
    command = start("train", config)
    assert command.wait(120) == 1, command.text
    assert "error (worker 0): ConfigError: loss is" in command.text
    assert "a mean; allowed: the sum over rows" in command.text
    assert not (tmp_path / "runs" / "faulty").exists()
    assert command.survivors() == []
