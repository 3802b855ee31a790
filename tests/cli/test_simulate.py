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
        ("nois=3", "--world 'nois=3': allowed: KEY=NUMBER with num_rows, noise_scale_start"),
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
    assert err.splitlines()[-1] == "error: 3 of 5 decisions do not reproduce"
    assert "recorded 0.2: 64 (32 x 1), lr_scale 2, grad_norm 0.3 < 0.5: grow; replayed 0.2: 32" in err


def test_replay_with_another_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path)
    other = tmp_path / "other.yaml"
    other.write_text(dump_yaml(load_config(DIGITS, ["guards=[]", "policy.grad_norm_low=0.25"])))
    code, out, _ = call(capsys, "replay", run.uri, "--policy", str(other))
    assert code == 0
    rows = [line.split()[1:3] for line in out.splitlines() if line.strip()[:1] == "1"]
    assert rows == [["32", "32"], ["64", "32"], ["128", "64"], ["64", "32"]]
    empty = RunDirectory.create(str(tmp_path), "empty")
    empty.write_text("config.yaml", "name: empty\n")
    assert call(capsys, "replay", empty.uri)[0] == 2
