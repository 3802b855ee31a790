"""Wrong input: exit 2 and one line that names the key, what was found and what is allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.commands import call

ROOT = Path(__file__).parents[2]
BASE: dict[str, Any] = {
    "task": "ray_dynbs.tasks.tabular",
    "epochs": 2,
    "optimizer": {"name": "sgd", "lr": 0.1},
    "data": {"features": ["a", "b"], "label": "y"},
    "task_args": {"num_classes": 2},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A good configuration over a folder of two Parquet files."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = {"a": [1.0, 2.0] * 10, "b": [1, 2] * 10, "y": [0, 1] * 10, "text": ["p", "q"] * 10}
    for name in ("one", "two"):
        pq.write_table(pa.table(rows), folder / f"{name}.parquet")
    pq.write_table(pa.table(rows).slice(0, 0), tmp_path / "empty.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"not a parquet file at all")
    data = {**BASE, "out": str(tmp_path / "runs"), "data": {**BASE["data"], "train": str(folder)}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_a_good_configuration_is_summed_up(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "check", str(config))
    assert (code, err) == (0, "")
    assert "40 train rows" in out


@pytest.mark.parametrize("path", sorted((ROOT / "jobs" / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_configuration_is_good(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "check", str(path))
    assert (code, err) == (0, "")


WRONG = {
    "unknown key": ("batch.inital=3", "batch.inital: unknown key (did you mean 'initial'?)"),
    "unknown section": ("bach.initial=3", "bach: unknown key (did you mean 'batch'?)"),
    "wrong type": ("epochs=three", "epochs is 'three'; allowed: a whole number"),
    "fraction": ("epochs=1.5", "epochs is 1.5; allowed: a whole number"),
    "boolean": ("batch.initial=true", "batch.initial is True; allowed: a whole number"),
    "out of range": ("optimizer.lr=0", "optimizer.lr is 0; allowed: > 0"),
    "not finite": ("optimizer.lr=.nan", "optimizer.lr is nan; allowed: a finite number"),
    "min above max": ("batch.min=600", "batch: min is 600 and max is 512; allowed: min at most max"),
    "initial outside": ("batch.initial=600", "batch: initial is 600; allowed: 8 to 512"),
    "unknown choice": (
        "lr.rule=linera",
        "lr.rule is 'linera' (did you mean 'linear'?); allowed: 'none', 'linear', ",
    ),
    "union": ("cluster.use_gpu=maybe", "cluster.use_gpu is 'maybe'; allowed: 'auto' or true or false"),
    "unknown policy": ("policy.name=treshold", "policy.name is 'treshold' (did you mean 'threshold'?)"),
    "policy import": ("policy.name=nope.policy", "policy.name is 'nope.policy', which does not import"),
    "no policy": ("policy.name=json.dumps", "policy.obj is missing"),
    "policy key": (
        "policy.grad_norm_hi=3",
        "policy.grad_norm_hi: unknown key (did you mean 'grad_norm_high'?)",
    ),
    "policy type": ("policy.grad_norm_high=x", "policy.grad_norm_high is 'x'; allowed: a number"),
    "policy range": ("policy.grad_norm_high=-1", "policy.grad_norm_high is -1.0; allowed: > 0"),
    "policy order": ("policy.grad_norm_low=20", "grad_norm_low is 20.0 and grad_norm_high is 10.0"),
    "guard": ("guards.0.name=warmup", "guards.0.name is 'warmup' (did you mean 'warmup_hold'?)"),
    "guard key": ("guards.1.decision=1", "guards.1.decision: unknown key (did you mean 'decisions'?)"),
    "guard index": ("guards.7.epochs=1", "'7' is no item of a list of 2"),
    "optimizer": (
        "optimizer.name=sdg",
        "optimizer.name is 'sdg' (did you mean 'sgd'?); allowed: 'sgd', 'adam' or 'adamw'",
    ),
    "optimizer key": ("optimizer.momentun=0.9", "optimizer (sgd): unknown argument 'momentun'"),
    "scheduler": ("scheduler.name=Cosine", "scheduler.name is 'Cosine'; allowed: none, "),
    "scheduler key": ("scheduler.name=CosineAnnealingLR", "missing 1 required positional argument: 'T_max'"),
    "precision": (
        "precision=fp8",
        "precision is 'fp8' (did you mean 'fp64'?); allowed: 'auto', 'fp32', 'bf16', 'fp16' or 'fp64'",
    ),
    "task": ("task=nope.task", "task 'nope.task' does not import: ModuleNotFoundError"),
    "task misspelt": (
        "task=my_tsk",
        "task 'my_tsk' does not import: ModuleNotFoundError: No module named 'my_tsk'",
    ),
    "task without parts": ("task=json", "task 'json' has no build_model, loss"),
    "task argument": ("task_args.hiden=[3]", "task_args.hiden: unknown key"),
    "missing file": ("data.train=/nope/x.parquet", "train data '/nope/x.parquet': no such file or folder"),
    "missing column": ("data.features=[a, z]", "no column 'z'; it has a, b, y, text"),
    "no workers": ("cluster.num_workers=0", "cluster.num_workers is 0; allowed: >= 1"),
    "name": ("name=a/b", "name is 'a/b'"),
    "no value": ("epochs", "--set 'epochs': allowed: section.key=value"),
    "no section": ("epochs.x=3", "epochs is 2, which has no keys"),
    "bad yaml": ("batch={", "--set batch={"),
    "scheduler misspelt": ("scheduler.nmae=StepLR", "scheduler: unknown key 'nmae' (did you mean 'name'?)"),
    "auto inside": (
        "scheduler={name: MultiStepLR, milestones: [auto]}",
        "milestones is ['auto']; allowed: auto",
    ),
    "scheduler fails": (
        "scheduler={name: StepLR, step_size: 0}",
        "scheduler (StepLR): fails within the run's",
    ),
    "optimizer nan": ("optimizer.momentum=.nan", "momentum is nan; allowed: finite numbers"),
    "optimizer value": ("optimizer={name: adam, lr: 0.1, betas: [0.9]}", "optimizer (adam): "),
    "columns twice": ("data.features=[a, a]", "column 'a' is given twice"),
    "resources": (
        "cluster.resources_per_worker={CPU: -1}",
        "cluster.resources_per_worker.CPU is -1; allowed: > 0",
    ),
    "empty out": ("out=''", "out is ''; allowed: "),
    "hidden": ("task_args={num_classes: 2, hidden: 3}", "task_args.hidden is 3; allowed: a list"),
    "policy is a module": ("policy.name=os.path", "a module; allowed: a function or class"),
    "policy raises": ("policy.name=tests.problem_task.explode", "explode failed: ZeroDivisionError"),
    "scheme": ("data.train=nope://x/y", "nope://x/y"),
    "cadence": (
        "batch.decide_every=3",
        "batch.decide_every is 3; allowed: epoch, {steps: N} or {samples: N}",
    ),
    "cadence's key": (
        "batch.decide_every={stpes: 3}",
        "decide_every is {'stpes': 3}; allowed: epoch, {steps: N}",
    ),
    "checkpoint's cadence": (
        "checkpoint.every={steps: 0}",
        "checkpoint: every is {'steps': 0}; allowed: epoch, ",
    ),
    "null beta": (
        "optimizer={name: adam, lr: 0.1, betas: [null, 0.99]}",
        "optimizer (adam): ",
    ),
    "text beta": ("optimizer={name: adam, lr: 0.1, betas: ['a', 0.99]}", "optimizer (adam): "),
    "list beta": ("optimizer={name: adam, lr: 0.1, betas: [[0.9], 0.99]}", "optimizer (adam): "),
    "impossible date": ("epochs=2020-13-45", "--set epochs=2020-13-45: not YAML: month must be in 1..12"),
    "digits": (f"epochs={'9' * 5000}", "not YAML: Exceeds the limit"),
    "huge": (f"seed={10**30}", "seed is 10000000000000000000...; allowed: at most 9223372036854775807"),
    "huge rows": (f"lr.reference_batch_size={10**17}", "lr.reference_batch_size is 1"),
    "policy's text": (
        "policy=noise_scale",
        "allowed: a mapping such as {name: noise_scale} (as --set: policy.name=",
    ),
    "guard's text": (
        "guards=[cooldown]",
        "guards.0 is 'cooldown'; allowed: a mapping such as {name",
    ),
    "number of steps": (
        "checkpoint.every=50",
        "checkpoint.every is 50; allowed: epoch, {steps: N} or {samples: N}",
    ),
    "key's place": ("policy={name: norm_test, eta: 2.0}", "policy.eta is 2.0; allowed: > 0 and < 1"),
    "misspelt rule": ("lr.rule=linera", "lr.rule is 'linera' (did you mean 'linear'?); allowed: "),
    "state of no kind": (
        "policy={name: tests.problem_task.forgetful}",
        "a first decision failed: TypeError: Object of type set",
    ),
    "evaluation's cadence": (
        "evaluate.every={samples: 0}",
        "evaluate: every is {'samples': 0}; allowed: epoch, ",
    ),
    "gain of nothing": (
        "lr.progress=gain",
        "lr: progress is 'gain' and rule is 'none', which has none; allowed with adascale and adascale_sqrt",
    ),
    "betas of nothing": ("lr.rule=half_life", "changes betas, and SGD has none in its parameter groups"),
    "metric of nothing": (
        "noise.preconditioned=true",
        "noise.preconditioned is true, and SGD keeps no second moments; allowed: adam or adamw",
    ),
    "cadence of nothing": (
        "batch.decide_every={steps: 0}",
        "decide_every is {'steps': 0}; allowed: epoch, {steps: N}",
    ),
    "workers": ("cluster.num_workers=[3, 2]", "num_workers is [3, 2]; allowed: a number, or [min, max]"),
    "workers of nothing": ("cluster.num_workers=0", "cluster.num_workers is 0; allowed: >= 1"),
    "failures": (
        "cluster.max_failures=some",
        "cluster.max_failures is 'some'; allowed: 'auto' or a whole number",
    ),
}


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case: str, command: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override, words = WRONG[case]
    code, out, err = call(capsys, command, str(config), "--set", override)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    assert err.startswith("error: ")
    assert words in err
    assert not (config.parent / "runs").exists()


@pytest.mark.parametrize(("command", "key"), [("check", "epochs"), ("tune", "seeds")])
def test_a_value_of_the_command_line_is_not_blamed_on_the_file(
    command: str, key: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "tune":
        config.write_text("base: {}\nspace: {batch.initial: {choice: [8, 16]}}\n")
    err = call(capsys, command, str(config), "--set", f"{key}=many", "--set", "name=a")[2]
    assert err.startswith(f"error: {config} with --set {key}=many --set name=a: {key} is 'many'; allowed")


TOGETHER = {
    "noise off": (
        ["policy.name=noise_scale", "noise.measure_every=null"],
        "is 'noise_scale', which needs gradient noise, and noise.measure_every is null; allowed: auto",
    ),
    "noise off, a rule": (
        ["lr.rule=adascale", "noise.measure_every=null"],
        "lr.rule is 'adascale', which needs gradient noise, and noise.measure_every is null; allowed: auto",
    ),
    "nothing to compare": (
        ["policy.name=norm_test", "noise.lone=none"],
        "policy.name is 'norm_test', which needs gradient noise, and one worker with one micro-batch",
    ),
    "captured betas": (
        ["optimizer={name: adam, lr: 0.1, capturable: true}", "lr.rule=half_life"],
        "Adam is capturable with betas (0.9, 0.999), which a captured graph keeps; allowed: tensors",
    ),
    "clamp elsewhere": (
        ["guards=[{name: clamp, min: 1000, max: 2000}]"],
        "guards.0: clamp allows 1000 to 2000, batch.min is 8 and batch.max is ",
    ),
    "quantise elsewhere": (
        ["guards=[{name: quantise, multiple_of: 100000}]"],
        "guards.0: quantise allows no size in between, batch.min is 8 and batch.max is ",
    ),
    "floor above the first size": (
        ["guards=[{name: class_coverage, class_counts: [9.0, 1.0], quantile: 0.99}]", "batch.initial=16"],
        "guards.0: class_coverage needs 44 rows, batch.initial is 16; allowed: a larger batch.initial",
    ),
    "list of words": (
        ["guards=[cooldown]", "guards.0.name=clamp"],
        "--set guards.0.name=clamp: 0 is 'cooldown', which has no keys",
    ),
    "a word's key": (
        ["data.features=[a]", "data.features.0.x=1"],
        "--set data.features.0.x=1: 0 is 'a', which has no keys",
    ),
    "cycled betas": (
        [
            "optimizer={name: adam, lr: 0.001}",
            "lr.rule=adam_sde",
            "batch.max=256",
            "scheduler={name: OneCycleLR, max_lr: 0.001, total_steps: auto}",
        ],
        "scheduler (OneCycleLR): lr.rule adam_sde holds below ",
    ),
    "floor above ceiling": (
        ["guards=[{name: class_coverage, class_counts: [99.0, 1.0]}]", "batch.max=64"],
        "guards.0: class_coverage needs 299 rows, batch.max is 64; allowed: a larger batch.max",
    ),
    "rule ends inside": (
        ["optimizer.name=adam", "lr.rule=adam_sde", "batch.max=512"],
        "below 10 times the reference batch of 32 (betas 0.9, 0.999), batch.max is 512; allowed: at most 319",
    ),
    "rule ends inside, by betas": (
        ["optimizer.name=adam", "optimizer.betas=[0.5, 0.9]", "lr.rule=adam_sde", "batch.max=64"],
        "below 2 times the reference batch of 32 (betas 0.5, 0.9), batch.max is 64; allowed: at most 63",
    ),
    "reset without a cadence": (
        ["batch.reset=to_base"],
        "batch: reset is 'to_base' and decide_every is 'epoch': the size would never change; allowed: ",
    ),
    "table": (
        ["policy.name=schedule", "policy.stages=[[0.0, 16.0], [0.0, 32.0]]"],
        "policy: schedule: a stage from 0 follows one from 0; allowed: in order",
    ),
    "relative": (
        ["policy.relative=true", "policy.grad_norm_low=3.0"],
        "threshold: grad_norm_low is 3.0 and grad_norm_high is 2.0; allowed: grad_norm_low below",
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_keys_that_do_not_go_together(case: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, words = TOGETHER[case]
    code, _, err = call(capsys, "check", str(config), *(a for o in overrides for a in ("--set", o)))
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty", "no rows; allowed: at least 1"),
        ("broken", "not readable as Parquet"),
        ("absent", "no such file"),
    ],
)
def test_files_without_rows(name: str, words: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config.parent / f"{name}.parquet"
    code, out, err = call(capsys, "train", str(config), "--set", f"data.train={path}")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err
    assert str(path) in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs: [1", "not YAML: line 1"),
        ("- a\n- b", "holds list; allowed: a mapping"),
        ("", "holds NoneType"),
        ("epochs: 1\nepochs: 2\n", "line 2: key 'epochs' is given twice"),
        ("epochs: 1\n", "task is missing"),
        ("a: !!python/object/apply:os.getcwd []", "not YAML"),
        ("\x00", "not YAML"),
    ],
)
def test_files_that_are_no_configuration(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    code, _, err = call(capsys, "check", str(path))
    assert code == 2
    assert err.count("\n") == 1
    assert str(path) in err
    assert words in err


def test_merge_keys_and_anchors_work(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = config.read_text() + "\nbatch: {<<: &base {initial: 16, min: 8}, max: 24}\n"
    config.write_text(text)
    code, out, _ = call(capsys, "check", str(config))
    assert code == 0
    assert "batch 16 in [8, 24]" in out


def test_a_folder_may_hold_other_things(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "data" / "README.md").write_text("about these rows")
    code, out, _ = call(capsys, "check", str(config))
    assert code == 0
    assert "40 train rows" in out


def test_a_missing_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "check", "nope.yaml") == (2, "", "error: nope.yaml: No such file or directory\n")


@pytest.mark.parametrize(
    "arguments",
    [["trian"], ["train"], ["train", "x.yaml", "--nope"], ["check"], ["train", "x.yaml", "y.yaml"]],
)
def test_wrong_use(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("out", ["file", "file/below/it"])
def test_an_out_that_cannot_be_written(
    out: str, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (config.parent / "file").write_text("in the way")
    monkeypatch.chdir(config.parent)
    code, _, err = call(capsys, "train", str(config), "--out", out)
    assert code == 2
    assert f"out is '{out}'" in err
    assert "is a file; allowed: a folder or a URI" in err
    assert err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_out_without_permission(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = config.parent / "closed"
    closed.mkdir(mode=0o500)
    code, _, err = call(capsys, "train", str(config), "--out", str(closed / "runs"))
    assert code == 2
    assert "may not be written by this user" in err


def test_nothing_to_resume(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "train", str(config), "--resume")
    assert code == 2
    assert "--resume: no run named 'config' in" in err
    code, _, err = call(capsys, "train", str(config), "--resume", str(config.parent / "nowhere"))
    assert code == 2
    assert "not a run directory" in err
    assert not (config.parent / "runs").exists()


def test_a_rule_that_does_not_fit_and_a_batch_above_the_data_are_warned_about(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "check", str(config), "--set", "lr.rule=sqrt", "--set", "batch.initial=64")
    assert code == 0
    assert err.splitlines() == [
        "warning: lr.rule sqrt is made for adam and adamw; for sgd use linear",
        "warning: batch.initial is 64, but there are 40 rows: one step per epoch",
    ]


def test_another_policy_starts_its_section_anew(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--set", "policy.grad_norm_high=5", "--set", "policy.name=fixed"]
    code, out, _ = call(capsys, "check", str(config), *overrides)
    assert code == 0
    assert "policy fixed" in out


def test_the_schema_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "check", "--schema")
    assert code == 0
    for key in (
        "batch.initial",
        "lr.warmup_epochs",
        "grad_norm_high",
        "memory_grows",
        "decisions",
        "lr.rule sqrt",
    ):
        assert key in out
    assert "object at" not in out
    assert "PydanticUndefined" not in out


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (
            "import pyarrow as pa; return {'train': pa.table({'a': [1.0], 'b': [2], 'y': [0]})}",
            0,
            "1 train rows",
        ),
        ("import ray.data; return {'train': ray.data.range(5)}", 0, "rows known once its pipeline runs"),
        (
            "return {'train': [], 'test': []}",
            2,
            "datasets() returned ['test', 'train']; allowed: train, validation",
        ),
        ("return 3", 2, "datasets() returned int"),
        ("raise OSError('disk on fire')", 2, "datasets() failed: OSError: disk on fire"),
    ],
)
def test_what_a_task_may_return_as_data(
    body: str, code: int, words: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, as a user would: without Ray nothing is started and nothing joined."""
    (config.parent / "bringing.py").write_text(
        f"from ray_dynbs.tasks.tabular import build_model, loss\ndef datasets(config):\n    {body}\n"
    )
    command = [sys.executable, "-m", "ray_dynbs", "check", config.name]
    result = subprocess.run(
        [*command, "--set", "task=bringing", "--set", "data.train=null", "--set", "batch.initial=8"],
        cwd=config.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == code
    assert result.stderr.count("\n") <= 1
    assert words in result.stdout + result.stderr


def test_a_task_beside_the_working_directory_is_found(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (config.parent / "my_own_task.py").write_text("from ray_dynbs.tasks.tabular import build_model, loss\n")
    monkeypatch.chdir(config.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert call(capsys, "check", "config.yaml", "--set", "task=my_own_task")[0] == 0
    sys.modules.pop("my_own_task")
