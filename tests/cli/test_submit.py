"""Jobs on a real head node, with and without a token: logs, exit codes, Ctrl-C, and what is sent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import call
from tests.heads import HOST, OPEN, ROOT, WITH_TOKEN, Head, free_ports, head

DIGITS = "jobs/configs/digits.yaml"
SMALL = ["--set", "task_args={channels: [4, 4]}"]


@pytest.fixture(scope="module", params=[False, True], ids=["open", "token"])
def node(request: pytest.FixtureRequest) -> Iterator[Head]:
    with head(with_token=request.param) as started:
        yield started


def submit(
    node: Head, *arguments: str, folder: Path = ROOT, token: bool | None = None
) -> subprocess.Popen[str]:
    """``ray-dynbs submit`` as a user types it, who has the token but has not told Ray so."""
    found = node.with_token if token is None else token
    environment = node.environment(token=found) | {"PYTHONPATH": str(ROOT)}
    environment.pop("RAY_AUTH_MODE", None)
    return subprocess.Popen(
        [sys.executable, "-m", "ray_dynbs", "submit", *arguments, "--address", node.jobs],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=folder,
        env=environment,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 200) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@OPEN
def test_a_job_is_followed_and_its_exit_codes_passed_on(node: Head, tmp_path: Path) -> None:
    code, output = finish(submit(node, "train", DIGITS, "--set", "epochs=2", *SMALL, "--set", "name=first"))
    assert code == 0, output
    assert ".venv" in output.partition("left out: ")[2] or not (ROOT / ".venv").exists()
    assert "\n    2 " in output
    assert "done: 2 epochs" in output
    record = node.home / "ray_results" / "runs" / "first"  # not in Ray's copy of the folder
    assert (record / "epochs.parquet").is_file()
    packages = list(Path(node.temp).glob("session_latest/runtime_resources/working_dir_files/_ray_pkg_*"))
    assert packages
    assert not [
        p for package in packages for p in package.rglob("*") if p.name in (".venv", "pyvenv.cfg", ".git")
    ]

    code, output = finish(submit(node, DIGITS, "--set", "task=nonsense"))
    assert code == 2, output
    assert "error: task 'nonsense' does not import" in output

    (tmp_path / "bad_task.py").write_text(
        "from ray_dynbs.tasks.digits import *\n"
        "import torch\n"
        "whole = loss\n"
        "def loss(model, batch):\n"
        "    if torch.is_grad_enabled():\n"  # in training only
        "        raise ValueError('no luck')\n"
        "    return whole(model, batch)\n"
    )
    (tmp_path / "bad.yaml").write_text(
        (ROOT / DIGITS).read_text().replace("ray_dynbs.tasks.digits", "bad_task")
    )
    code, output = finish(submit(node, "bad.yaml", "--set", "cluster.num_workers=1", folder=tmp_path))
    assert code == 1, output
    assert "ValueError: no luck" in output
    assert node.leftovers() == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
@WITH_TOKEN
def test_ctrl_c_stops_the_job_and_it_can_be_resumed(node: Head) -> None:
    process = submit(node, DIGITS, "--set", "epochs=300", *SMALL, "--set", "name=long")
    record = node.home / "ray_results" / "runs" / "long"
    deadline = time.monotonic() + 120
    while not (record / "epochs.parquet").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "stopping long-" in output
    assert output.count("interrupted; go on with it by --resume") == 1  # the job's own last words
    assert output.count("Running entrypoint") == 1  # nothing is shown twice
    assert [job["status"] for job in node.get("/api/jobs/") if job["submission_id"].startswith("long-")] == [
        "STOPPED"
    ]
    assert node.leftovers() == []
    code, output = finish(submit(node, DIGITS, "--set", "epochs=1", "--set", "name=long", "--resume"))
    assert code == 0, output
    assert "nothing left to do" in output


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
@OPEN
def test_ray_job_submit_and_a_search(node: Head) -> None:
    """The entry points of ``jobs/`` under Ray's own command, whose exit code is 0 or 1."""

    def ray_job(*entry: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", node.jobs]
        return finish(
            subprocess.Popen(
                [*command, "--working-dir", ".", "--", "python", *entry],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env=node.environment(token=node.with_token),
            )
        )

    code, output = ray_job("jobs/train.py", DIGITS, "--set", "epochs=1", *SMALL)
    assert code == 0, output
    assert "done: 1 epochs" in output
    code, output = ray_job("jobs/train.py", DIGITS, "--set", "epochs=none")
    assert code == 1, output
    assert "epochs" in output
    failed = [
        job
        for job in node.get("/api/jobs/")
        if job["status"] == "FAILED" and "epochs=none" in job["entrypoint"]
    ]
    assert [job["driver_exit_code"] for job in failed] == [2]
    small = ["--set", "search.num_trials=2", "--set", "set.epochs=2", "--set", "seeds=1"]
    code, output = ray_job("jobs/tune.py", "tune_configs/thresholds.yaml", *small)
    assert code == 0, output
    assert "best.yaml" in output
    code, output = finish(submit(node, "tune", "tune_configs/thresholds.yaml", *small))
    assert code == 0, output
    assert "runs/thresholds-2/best.yaml" in output
    assert node.leftovers() == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_token_that_is_missing_or_wrong_is_said(node: Head) -> None:
    if not node.with_token:
        code, output = finish(submit(node, DIGITS, "--no-wait", "--set", "task=nonsense", token=True))
        assert code == 0, output  # nobody asked for it
        return
    code, output = finish(submit(node, DIGITS, token=False), 15)
    assert code == 2, output
    assert "asks for a token, none was found; allowed: one in RAY_AUTH_TOKEN" in output
    secret = node.token.read_text()
    node.token.write_text("x" * len(secret))
    try:
        code, output = finish(submit(node, DIGITS), 15)
    finally:
        node.token.write_text(secret)
    assert code == 2, output
    assert f"does not accept the token from RAY_AUTH_TOKEN_PATH={node.token}" in output
    assert secret not in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([DIGITS, "--address", f"{HOST}:1"], f"no scheme; allowed: http://{HOST}:1"),
        (
            [DIGITS, "--address", f"ray://{HOST}:10001"],
            f"ray:// is no job server's; allowed: http://{HOST}:8265",
        ),
        ([DIGITS, "--address", "http://{closed}"], "no job server answers there (connection refused)"),
        ([DIGITS], "--address is missing"),
        (
            ["trian", DIGITS],
            "submit trian jobs/configs/digits.yaml: allowed: submit [train|tune|probe] CONFIG",
        ),
        (["tune"], "submit tune: allowed"),
        (
            ["probe", DIGITS, "--out", "x"],
            "submit probe: --out or --resume is given; allowed with train and tune",
        ),
        ([DIGITS, "--set", "epochs=none"], "epochs"),
        (["tune", DIGITS], "digits.yaml"),
        (["nowhere.yaml"], "nowhere.yaml: No such file"),
        ([DIGITS, "--working-dir", "tests"], "lies outside of the folder that is sent"),
        ([DIGITS, "--runtime-env", DIGITS + "x"], "No such file"),
    ],
)
def test_wrong_input_is_said_before_anything_is_sent(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    closed = f"{HOST}:{free_ports(1)[0]}"
    code, out, err = call(capsys, "submit", *(each.replace("{closed}", closed) for each in arguments))
    assert code == 2
    assert complaint in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "sending" not in out
