"""``simulate`` and ``replay`` as a user calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_dynbs.config import load_config
from ray_dynbs.config.load import dump_yaml
from ray_dynbs.core.journal import encode_line
from ray_dynbs.core.signal import Signal
from ray_dynbs.storage.run_directory import RunDirectory
from tests.commands import call

DIGITS = Path(__file__).parents[2] / "jobs" / "configs" / "digits.yaml"


def test_simulate_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    options = [
        "--set",
        "policy.name=noise_scale",
        "--world",
        "num_rows=2000",
        "--world",
        "step_time.alpha_c=1",
    ]
    code, out, err = call(capsys, "simulate", str(DIGITS), *options, "--plot", str(picture))
    assert (code, err) == (0, "")
    assert "passes at the reference batch" in " ".join(out.split())
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("world", "words"),
    [
        ("nois=3", "--world 'nois=3'"),
        ("rows=3", "(did you mean 'num_rows'?): allowed: KEY=NUMBER with num_rows, noise_scale_start"),
        ("num_rows=1.5", "--world num_rows is '1.5'; allowed: a whole number"),
        ("grad_norm_start=1e200", "grad_norm_start is 1e+200; allowed: >= 1e-30 and <= 1e+30"),
        ("step_time.gamma=0", "gamma is 0.0; allowed: >= 1 and <= 10"),
        ("step_time.alpha_c=-1", "alpha_c is -1.0; allowed: >= 0"),
        ("step_time.alpha_c=.nan", "--world step_time.alpha_c is '.nan'; allowed: a number"),
        ("noise_scale_start=1e-300", "noise_scale_start is 1e-300; allowed: >= 1e-09"),
        ("num_rows", "allowed: KEY=NUMBER"),
        ("num_rows=many", "--world num_rows is 'many'; allowed: a number"),
        ("epochs=0", "epochs is 0.0; allowed: > 0"),
    ],
)
def test_a_wrong_world_is_refused(world: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "simulate", str(DIGITS), "--world", world)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def recorded(folder: Path) -> RunDirectory:
    """A journal of four decisions under the digits configuration."""
    config = load_config(DIGITS, ["guards=[]"])
    run = RunDirectory.create(str(folder), "run")
    manager = config.make_manager(2)
    decisions = [manager.start(world_size=2, num_rows=1437)]
    for norm in (1.0, 0.3, 0.2, 20.0):
        signal = Signal.measured(
            plan_version=manager.version, num_steps=1, num_finite_steps=1, grad_norm=norm
        )
        decisions.append(manager.decide(signal))
    run.write_text("config.yaml", dump_yaml(config))
    run.write_text("decisions.jsonl", "".join(encode_line(each) + "\n" for each in decisions))
    return run


def test_replay_is_bit_for_bit_or_says_where_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path)
    assert call(capsys, "replay", run.uri)[:2] == (0, "all 5 decisions reproduce, bit for bit\n")
    run.write_text(
        "decisions.jsonl", run.read_text("decisions.jsonl").replace('"grad_norm": 0.3', '"grad_norm": 3.0')
    )
    code, _, err = call(capsys, "replay", run.uri)
    assert code == 1
    assert err.splitlines()[-1].startswith("error: 3 of 5 decisions do not reproduce: was config.yaml edited")
    assert "recorded 0.2: 64 (32 x 1), lr_scale 2, grad_norm 0.3 < 0.5: grow; replayed 0.2: 32" in err


def test_replay_with_another_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path)
    other = tmp_path / "other.yaml"
    other.write_text(dump_yaml(load_config(DIGITS, ["guards=[]", "policy.grad_norm_low=0.25"])))
    code, out, _ = call(capsys, "replay", run.uri, "--policy", str(other))
    assert code == 0
    rows = [line.split()[2:4] for line in out.splitlines() if line.strip()[:1] == "1"]
    assert rows == [["32", "32"], ["64", "32"], ["128", "64"], ["64", "32"]]
    empty = RunDirectory.create(str(tmp_path), "empty")
    empty.write_text("config.yaml", "name: empty\n")
    assert call(capsys, "replay", empty.uri)[0] == 2


def test_replay_takes_the_deciding_sections_of_any_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = recorded(tmp_path), tmp_path / "other.yaml"
    other.write_text("policy: {name: fixed}\n")
    code, out, _ = call(capsys, "replay", run.uri, "--policy", str(other))
    assert code == 0
    assert [line.split()[3] for line in out.splitlines() if line.strip()[:1] == "1"] == ["32"] * 4
    for text, words in [
        ("nothing: 1\n", "holds none of batch, policy"),
        ("policy: {name: fixd}\n", "policy.name is 'fixd' (did you mean 'fixed'?)"),
        ("policy: {name: \n", "not YAML"),
    ]:
        other.write_text(text)
        code, _, err = call(capsys, "replay", run.uri, "--policy", str(other))
        assert (code, err.count("\n")) == (2, 1)
        assert words in err


def test_simulate_knows_the_rows_of_the_data_and_explains_its_world(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "simulated: 1,437 rows a pass" in call(capsys, "simulate", str(DIGITS))[1]
    out = call(capsys, "simulate", str(DIGITS), "--world", "help")[1]
    assert "num_rows: rows in a pass; >= 1 and <= 1e+12; default 50000" in out
    assert "step_time.gamma: " in out


def test_simulate_decides_when_it_is_due_and_measures_what_would_be_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = ["--set", "cluster.num_workers=1", "--set", "policy.name=noise_scale", "--set", "guards=[]"]
    within = ["--set", "batch.decide_every={steps: 20}", "--set", "batch.reset=to_base", "--set", "epochs=3"]
    out = call(capsys, "simulate", str(DIGITS), *alone, *within)[1]
    assert [line.split()[1] for line in out.splitlines()[1:4]] != ["32", "32", "32"]
    still = call(capsys, "simulate", str(DIGITS), *alone, "--set", "noise.lone=none")
    assert still[0] == 2
    limited = ["--set", "noise.lone=none", "--set", "memory.max_micro_batch_size=64"]
    out = call(capsys, "simulate", str(DIGITS), *alone, *limited, "--set", "epochs=3")[1]
    assert "noise_scale not measured: hold" in out


@pytest.mark.parametrize("options", [["--seed", "-1"], ["--plot", "/nonexistent/folder/x.png"]])
def test_other_wrong_options_of_simulate(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "simulate", str(DIGITS), *options)
    assert (code, err.count("\n")) == (2, 1)
    assert options[0] in err
