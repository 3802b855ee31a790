"""Run directories: names, numbers, atomic files, URIs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.storage.run_directory import CONFIG, DECISIONS, EPOCHS, RunDirectory
from ray_dynbs.storage.tables import EPOCH_SCHEMA


def test_a_taken_name_gets_a_number_and_the_newest_is_the_highest(tmp_path: Path) -> None:
    out = f"{tmp_path}/runs/"
    runs = [RunDirectory.create(out, "digits") for _ in range(11)]
    for run in runs:
        run.write_text(CONFIG, "epochs: 1\nname: digits\n")
    names = [run.name for run in runs]
    assert names == ["digits", *(f"digits-{n}" for n in range(2, 12))]
    RunDirectory.create(out, "digits-wide")
    RunDirectory.create(out, "digits-40").write_text(CONFIG, "name: digits-40\n")
    RunDirectory.create(out, "digits")  # has no configuration yet
    assert RunDirectory.newest(out, "digits").name == "digits-11"
    (tmp_path / "runs" / "digits-99").write_text("a file is no run")
    assert RunDirectory.newest(out, "digits").name == "digits-11"


def test_runs_that_begin_together_have_directories_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: RunDirectory.create(str(tmp_path), "run").name, range(40)))
    assert len(set(names)) == 40


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_paths_with_spaces_and_other_letters(scheme: str, tmp_path: Path) -> None:
    folder = tmp_path / ("mine" if scheme else "größe und mehr")
    run = RunDirectory.create(f"{scheme}{folder}", "run")
    run.write_text(CONFIG, "ä: 1\n")
    run.write_bytes("deep/er/file.bin", b"\x00\x01")
    assert RunDirectory.open(run.uri).read_text(CONFIG) == "ä: 1\n"
    assert (folder / "run" / "deep" / "er" / "file.bin").read_bytes() == b"\x00\x01"
    assert sorted(p.name for p in (folder / "run").iterdir()) == [CONFIG, "deep"]


def test_a_relative_directory_means_the_same_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(RunDirectory.create("runs", "run").absolute_uri)
    monkeypatch.chdir("/")
    run.write_text("file", "x")
    assert (tmp_path / "runs" / "run" / "file").exists()


def test_epochs_keep_their_schema_and_their_gaps(tmp_path: Path) -> None:
    run = RunDirectory.create(str(tmp_path), "run")
    assert run.read_epochs() == []
    row = dict.fromkeys(EPOCH_SCHEMA.names) | {"epoch": 0, "rows": 7, "train_loss": 0.1}
    run.write_epochs([row])
    assert run.read_epochs() == [row]


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(str(tmp_path), "run")
    run.write_epochs([dict.fromkeys(EPOCH_SCHEMA.names) | {"epoch": 0}])
    whole = run.read_bytes(EPOCHS)
    for damaged in (b"", whole[:-9], whole[:100], b"PAR1" + bytes(50) + b"PAR1"):
        run.write_bytes(EPOCHS, damaged)
        with pytest.raises(ConfigError, match=f"{run.uri}/{EPOCHS}: damaged, not a whole Parquet file: "):
            run.read_epochs()
    run.write_text(DECISIONS, '{"version": 1')
    with pytest.raises(ConfigError, match=f"{run.uri}/{DECISIONS} line 1 is not a decision"):
        run.read_decisions()


def test_what_is_missing_or_foreign_is_said(tmp_path: Path) -> None:
    run = RunDirectory.create(str(tmp_path), "run")
    assert run.read_text("nothing.txt") == ""
    with pytest.raises(ConfigError, match="not a run directory"):
        RunDirectory.open(run.uri)
    with pytest.raises(ConfigError, match="no run named 'other'"):
        RunDirectory.newest(str(tmp_path), "other")
    with pytest.raises(ConfigError, match="nope://bucket/x"):
        RunDirectory.create("nope://bucket/x", "run")
