"""The library form: users' own loops on real workers equal plain loops; the README's takes ten lines."""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data
from ray.train import FailureConfig, RunConfig, ScalingConfig

import ray_dynbs
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.journal import decode_lines, replay
from ray_dynbs.storage.run_directory import DECISIONS, RunDirectory
from tests import adopted_loops
from tests.adopted_loops import EPOCHS, NUM_ROWS, SIZES
from tests.support import split_table, table

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]
ROOT = Path(__file__).parents[2]
ALTERNATE = {"name": "tests.problem_task.alternate", "sizes": SIZES[1:] + SIZES[:1]}
ADAPTER = {
    "batch": {"initial": 9, "min": 2, "max": 64},
    "policy": ALTERNATE,
    "guards": [],
    "lr": {"rule": "sqrt"},
    "clip_grad_norm": 2.0,
}


def fit(
    loop: Any, folder: Path, workers: int, dynbs: dict[str, Any], max_failures: int = 0, **options: Any
) -> tuple[Any, RunDirectory]:
    trainer = ray_dynbs.TorchTrainer(
        loop,
        train_loop_config=options.pop("train_loop_config", {}),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="adopted", storage_path=str(folder), failure_config=FailureConfig(max_failures=max_failures)
        ),
        dynbs=dynbs,
        **options,
    )
    return trainer.fit().return_value, trainer.record


@pytest.mark.usefixtures("cluster")
def test_a_loop_of_a_users_own_equals_a_plain_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DDP, frozen parameters, groups, LambdaLR, clipping, own checkpoints, a failure in epoch 3."""
    blocks = split_table(table(NUM_ROWS), [20, 21, 50])
    found, record = fit(
        adopted_loops.adapter_loop,
        tmp_path,
        2,
        ADAPTER,
        max_failures=1,
        datasets={"train": ray.data.from_arrow(blocks)},
        train_loop_config={"fail_in": 2},
    )
    expected = adopted_loops.plain_adapter_loop()
    lost = len(expected["losses"]) - len(found["losses"])  # those before it are in another process's list
    assert 0 < lost < len(expected["losses"])
    np.testing.assert_allclose(found["losses"], expected["losses"][lost:], rtol=1e-10)
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-10)
    assert found["lrs"] == pytest.approx(expected["lrs"])
    history = {row["epoch"]: row for row in record.read_epochs()}
    assert [history[epoch]["global_batch_size"] for epoch in range(EPOCHS)] == SIZES
    assert [history[epoch]["rows"] for epoch in range(EPOCHS)] == [NUM_ROWS] * EPOCHS
    assert [history[epoch]["val_loss"] for epoch in range(EPOCHS)] == [1 / (e + 1) for e in range(EPOCHS)]
    decisions = list(decode_lines(record.read_text(DECISIONS)))
    settings = ray_dynbs.TorchTrainer(lambda: None, dynbs=ADAPTER).settings
    assert replay(decisions, settings.make_manager) == []
    assert "the workers were restarted" in capsys.readouterr().out
    assert record.exists("report.html")


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_a_hugging_face_model_on_a_data_loader_of_ragged_rows(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[test]'")
    settings = {"batch": {"initial": 5, "min": 1}, "policy": {"name": "fixed"}, "shuffle": "full"}
    found, record = fit(adopted_loops.language_loop, tmp_path, 2, settings)
    expected = adopted_loops.plain_language_loop()
    # The weights are float64, but the model's own loss casts its scores to float32.
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-6)
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-5, atol=1e-7)
    # 5, 5, 5, 5, 3 rows, then 5, 5: rank 0 takes the larger halves; the pass left early is on record.
    assert found["rows"] == 3 * 4 + 2 + 3 * 2
    assert [(row["steps"], row["rows"]) for row in record.read_epochs()] == [(5, 23), (2, 10)]


@pytest.mark.usefixtures("cluster")
def test_refusals_before_training(tmp_path: Path) -> None:
    data = ray.data.from_arrow(table(20))
    with pytest.raises(
        ConfigError, match=r"dynbs\.batches: unknown key \(did you mean 'batch'\?\); allowed: seed"
    ):
        fit(adopted_loops.lazy_loop, tmp_path, 1, {"batches": 3})
    lazy = {"train": data, "validation": data.map_batches(lambda batch: batch)}
    with pytest.raises(
        ConfigError, match=r"datasets\['validation'\] is read while training, but 4 workers x 1"
    ):
        fit(adopted_loops.lazy_loop, tmp_path, 4, {}, datasets=lazy)
    text = pa.table({"text": ["a", "b"], "y": [1.0, 2.0]})
    with pytest.raises(ConfigError, match="train data: column 'text' is string; allowed: numbers"):
        fit(adopted_loops.lazy_loop, tmp_path, 1, {}, datasets={"train": ray.data.from_arrow(text)})
    with pytest.raises(RuntimeError, match=r"in a loop started by ray_dynbs\.TorchTrainer"):
        ray_dynbs.prepare(None, None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("cluster")
def test_a_mean_is_found_out_in_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ray.train.TrainingFailedError, match=r"a mean; allowed: the sum over rows"):
        fit(
            adopted_loops.forgetful_loop,
            tmp_path,
            1,
            {"batch": {"initial": 8}},
            datasets={"train": ray.data.from_arrow(table(20))},
        )


def readme_blocks() -> tuple[str, str]:
    """The README's loop before and after."""
    text = (ROOT / "README.md").read_text()
    before, after = re.findall(r"```python\n(# (?:before|after)\.py\n.*?)```", text, re.DOTALL)
    return before, after


def changed_lines(before: str, after: str) -> int:
    """A line changed, added or removed counts once; the first line, the file's name, is no part of it."""
    old, new = before.splitlines()[1:], after.splitlines()[1:]
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")


def run_script(script: str, folder: Path) -> list[float]:
    (folder / "script.py").write_text(script + "\nimport json\njson.dump(losses, open('losses.json', 'w'))\n")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


@pytest.mark.slow
def test_the_readmes_loop_changes_ten_lines_and_no_loss(tmp_path: Path) -> None:
    """Both as printed, but for fp64, one worker, and (after) the policy fixed in the order before."""
    before, after = readme_blocks()
    assert changed_lines(before, after) <= 10
    assert after.count("dynbs=") == 1
    for name, script in (("before", before), ("after", after)):
        (tmp_path / name / "data" / "train").mkdir(parents=True)
        rng = np.random.default_rng(0)
        y = rng.integers(0, 2, 1003)
        a, b = rng.normal(size=(2, 1003)) + 2 * y
        pq.write_table(pa.table({"a": a, "b": b, "y": y}), tmp_path / name / "data" / "train" / "p.parquet")
        assert "prepare_model(model)" in script
        assert "num_workers=2" in script
    swapped = [
        script.replace("prepare_model(model)", "prepare_model(model.double())") for script in (before, after)
    ]
    swapped = [script.replace("num_workers=2", "num_workers=1") for script in swapped]
    assert "(batch_size=16)" in before
    swapped[0] = swapped[0].replace("(batch_size=16)", "(batch_size=32)")  # of which there is one worker now
    fixed = 'dynbs={"policy": {"name": "fixed"}, "shuffle": "none"}'
    swapped[1] = re.sub(r"dynbs=\{.*\}", fixed, swapped[1])
    old = run_script(swapped[0], tmp_path / "before")
    new = run_script(swapped[1], tmp_path / "after")
    assert len(old) == 5 * 32
    np.testing.assert_allclose(new, old, rtol=1e-10)
