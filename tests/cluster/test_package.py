"""What is sent to a cluster: sources and what is needed, and nothing else."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from ray_dynbs.cluster import package
from ray_dynbs.cluster.package import PACKAGE, make_package
from ray_dynbs.core.errors import ConfigError


def fill(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def sent(folder: Path, *needed: str) -> set[str]:
    """Names sent of a folder, without this package's own."""
    files = make_package(folder, [folder / each for each in needed]).files
    own = {name for name in files if name.startswith(f"{PACKAGE.name}/")}
    assert f"{PACKAGE.name}/core/manager.py" in own
    assert f"{PACKAGE.name}/tasks/data/digits/ATTRIBUTION.md" in own
    assert not any("__pycache__" in name for name in own)
    return set(files) - own


def test_sources_are_sent_and_environments_caches_and_runs_are_not(tmp_path: Path) -> None:
    fill(tmp_path, "task.py", "lib/more.py", "conf/a.yaml", ".rayignore", ".hidden")
    (tmp_path / ".rayignore").write_text("")
    fill(
        tmp_path, ".git/HEAD", "__pycache__/a.pyc", "lib/__pycache__/b.pyc", ".venv/pyvenv.cfg", ".venv/bin/x"
    )
    fill(tmp_path, "env-of-mine/pyvenv.cfg", "env-of-mine/lib/y", "cache/CACHEDIR.TAG", "cache/z")
    fill(tmp_path, "runs/a/config.yaml", "runs/a/decisions.jsonl", "runs/a/checkpoints/big")
    fill(tmp_path, "runs/s/config.yaml", "runs/s/trials/1/results.json")
    assert sent(tmp_path) == {"task.py", "lib/more.py", "conf/a.yaml", ".rayignore", ".hidden"}
    behind = make_package(tmp_path).left_out
    assert set(behind) == {
        ".git", "__pycache__", "lib/__pycache__", ".venv", "env-of-mine", "cache", "runs/a", "runs/s",
    }  # fmt: skip


def test_ignore_files_hold_as_in_git_but_not_for_what_is_needed(tmp_path: Path) -> None:
    fill(
        tmp_path,
        "a.py",
        "a.log",
        "keep.log",
        "data/train/part.parquet",
        "data/other/part",
        "lib/x.tmp",
        "lib/y.py",
    )
    (tmp_path / ".gitignore").write_text("*.log\n!keep.log\n/data/\n")
    (tmp_path / "lib" / ".rayignore").write_text("*.tmp\n")
    usual = {"a.py", "keep.log", "lib/y.py", ".gitignore", "lib/.rayignore"}
    assert sent(tmp_path) == usual
    assert sent(tmp_path, "data/train") == usual | {"data/train/part.parquet"}
    assert sent(tmp_path, "a.log", "not/there") == usual | {"a.log"}


def test_links_are_followed_once_and_sockets_passed_over(tmp_path: Path) -> None:
    fill(tmp_path, "project/a.py", "elsewhere/data.bin")
    project = tmp_path / "project"
    (project / "again").symlink_to(project)
    (project / "data").symlink_to(tmp_path / "elsewhere")
    (project / "broken").symlink_to(tmp_path / "nowhere")
    os.mkfifo(project / "pipe")
    assert sent(project) == {"a.py", "data/data.bin"}


def test_a_folder_that_is_reached_twice_is_sent_twice(tmp_path: Path) -> None:
    fill(tmp_path, "src/model.py")
    (tmp_path / "alias").symlink_to(tmp_path / "src")
    assert sent(tmp_path) == {"src/model.py", "alias/model.py"}


def test_secrets_and_homes_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "a.py", ".ssh/id", ".aws/credentials", ".ray/auth_token", ".env", "lib/.env")
    assert sent(tmp_path) == {"a.py"}
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (tmp_path, Path("/")):
        with pytest.raises(ConfigError, match="is not sent as a whole"):
            make_package(folder)


def test_what_is_odd_is_said_in_one_line(tmp_path: Path) -> None:
    fill(tmp_path, "a.py")
    (tmp_path / ".gitignore").write_text("!\n")
    with pytest.raises(ConfigError, match=r"\.gitignore"):
        make_package(tmp_path)
    (tmp_path / ".gitignore").unlink()
    packed = make_package(tmp_path)
    (tmp_path / "a.py").unlink()
    with pytest.raises(ConfigError, match=r"a\.py: cannot be sent \(No such file or directory\)"):
        packed.write(tmp_path / "p.zip")


def test_a_copy_of_this_package_in_the_folder_is_the_one_that_is_sent(tmp_path: Path) -> None:
    fill(tmp_path, f"{PACKAGE.name}/__init__.py", "a.py")
    assert set(make_package(tmp_path).files) == {f"{PACKAGE.name}/__init__.py", "a.py"}


def test_unchanged_files_make_the_same_archive(tmp_path: Path) -> None:
    fill(tmp_path, "p/a.py", "p/run.sh")
    (tmp_path / "p" / "run.sh").chmod(0o755)
    archives = [tmp_path / "1.zip", tmp_path / "2.zip"]
    make_package(tmp_path / "p").write(archives[0])
    os.utime(tmp_path / "p" / "a.py", (1, 1))
    make_package(tmp_path / "p").write(archives[1])
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with zipfile.ZipFile(archives[0]) as archive:
        assert archive.read("a.py") == b"p/a.py"
        assert archive.getinfo("run.sh").external_attr >> 16 & 0o777 == 0o755


def test_what_cannot_be_sent_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "p/a.yaml", "p/large.bin", "other.yaml")
    with pytest.raises(ConfigError, match=r"other\.yaml: lies outside of the folder that is sent"):
        make_package(tmp_path / "p", [tmp_path / "other.yaml"])
    with pytest.raises(ConfigError, match="no folder"):
        make_package(tmp_path / "p" / "a.yaml")
    (tmp_path / "p" / "large.bin").write_bytes(os.urandom(2**20))
    monkeypatch.setattr(package, "MOST_BYTES", 2**20)
    with pytest.raises(
        ConfigError, match=r"more than the 1 MB that Ray takes; the largest: large\.bin \(1 MB\)"
    ):
        make_package(tmp_path / "p").write(tmp_path / "p.zip")
