"""Notebooks and scripts over a real Ray Client connection, with and without a token."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.heads import HOST, OPEN, ROOT, WITH_TOKEN, Head, free_ports, head

# The event loops that nbclient leaves behind own sockets, which complain when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
QUICKSTART = ROOT / "jobs" / "quickstart.ipynb"


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """They are collected here, and not in some other module's test."""
    yield
    gc.collect()


@pytest.fixture(scope="module", params=[False, True], ids=["open", "token"])
def node(request: pytest.FixtureRequest) -> Iterator[Head]:
    with head(with_token=request.param) as started:
        yield started


def environment(node: Head, *, token: bool | None = None) -> dict[str, str]:
    """Of a user who has the token, if there is one, but has not told Ray so."""
    found = node.environment(token=node.with_token if token is None else token)
    found.pop("RAY_AUTH_MODE", None)
    return found | {"PYTHONPATH": str(ROOT), "RAY_DYNBS_ADDRESS": node.ray_client}


class Kernel:
    """A notebook in a kernel of its own, whose environment is given.

    Args:
        cells: Sources.
        variables: The environment.
    """

    def __init__(self, cells: list[str], variables: dict[str, str], folder: Path) -> None:
        self.notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
        self._run(variables, folder)

    @classmethod
    def of(cls, path: Path, variables: dict[str, str]) -> Kernel:
        kernel = cls.__new__(cls)
        kernel.notebook = nbformat.read(path, 4)
        kernel._run(variables, path.parent)
        return kernel

    def _run(self, variables: dict[str, str], folder: Path) -> None:
        self.client = nbclient.NotebookClient(
            self.notebook,
            timeout=240,
            kernel_name="python3",
            allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
        )
        self._variables = variables

    def execute(self) -> None:
        self.client.execute(env=self._variables)

    def interrupt(self) -> None:
        import asyncio

        asyncio.run(self.client.km.interrupt_kernel())

    def text(self, number: int) -> str:
        """What a cell printed and returned."""
        cells = [cell for cell in self.notebook.cells if cell.cell_type == "code"]
        return "\n".join(_text(output) for output in cells[number].outputs)

    def kinds(self, number: int) -> list[str]:
        cells = [cell for cell in self.notebook.cells if cell.cell_type == "code"]
        return [kind for output in cells[number].outputs for kind in output.get("data", {})]


def _text(output: Any) -> str:
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    data = output.get("data", {})
    return str(output.get("text") or data.get("text/html") or data.get("text/plain") or "")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
@WITH_TOKEN
def test_the_quickstart(node: Head) -> None:
    kernel = Kernel.of(QUICKSTART, environment(node))
    kernel.execute()
    cells = [cell for cell in kernel.notebook.cells if cell.cell_type == "code"]
    errors = [output.evalue for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert errors == []
    assert kernel.text(0) == ""  # nothing of Ray's, of tqdm's or of widgets'
    assert "text/html" in kernel.kinds(1)
    assert "epoch 6 of 6" in kernel.text(1)
    assert "image/png" in kernel.kinds(4)
    assert "6 tensors" in kernel.text(5)
    assert "finished 6" in kernel.text(6)
    assert "trials ended" in kernel.text(7)
    assert (node.home / "ray_results" / "runs" / "quicksearch" / "best.yaml").is_file()
    assert node.leftovers() == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
@WITH_TOKEN
def test_an_interrupted_kernel_re_attaches_in_another_one(node: Head, tmp_path: Path) -> None:
    connect = 'import os, ray_dynbs\nray_dynbs.connect(os.environ["RAY_DYNBS_ADDRESS"], working_dir=None)'
    config = ROOT / "jobs" / "configs" / "digits.yaml"
    train = (
        f'run = ray_dynbs.train({str(config)!r}, set={{"name": "long", "epochs": 4000, '
        '"task_args": {"channels": [4, 4]}})'
    )
    first = Kernel(
        [connect, train, "print(run)", "again = ray_dynbs.train(" + train.partition("(")[2]],
        environment(node),
        tmp_path,
    )
    thread = threading.Thread(target=first.execute, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 150
        while not re.search(r"epoch \d+ of 4000, .* left", first.text(1)):
            assert time.monotonic() < deadline, first.text(1)
            time.sleep(0.3)
    finally:
        first.interrupt()
        thread.join(timeout=120)
    assert not thread.is_alive()
    assert "long goes on on the cluster: ray_dynbs.attach('long')" in first.text(1)
    assert "KeyboardInterrupt" in first.text(1)
    assert "NameError" in first.text(2)  # the cell was left before it had a run
    assert "ConfigError: long: a run of this name is in progress" in first.text(3)

    second = Kernel(
        [
            connect,
            'run = ray_dynbs.attach("long", wait=False)\nprint(run.status)\nbefore = run.epochs.num_rows',
            "import time\ntime.sleep(3)\nprint(run.epochs.num_rows > before)",
            "run.stop()\nrun.wait()\nprint(run.status, run.epochs.num_rows, len(run.decisions))",
            'print(ray_dynbs.attach("long", wait=False).status)',
            'ray_dynbs.attach("nonsense")',
        ],
        environment(node),
        tmp_path,
    )
    second.execute()
    assert "running" in second.text(1)
    assert second.text(2).strip() == "True"
    assert "epoch" in second.text(3)
    assert "stopped" in second.text(3)
    assert second.text(4).strip() in ("stopped", "ended")  # remembered, or already forgotten
    assert "ConfigError: attach: 'nonsense' is not in progress, and no run named 'nonsense'" in second.text(5)
    assert node.leftovers() == []


def script(text: str, variables: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=200,
        env=variables,
        cwd=folder,
        check=False,
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
@OPEN
def test_a_task_beside_the_script_and_its_failures(node: Head, tmp_path: Path) -> None:
    """The folder is sent; what is wrong is raised as what it is, and the next run may have the name."""
    (tmp_path / "own_task.py").write_text(
        "from ray_dynbs.tasks.digits import *\n"
        "import torch\n"
        "whole = loss\n"
        "def loss(model, batch):\n"
        "    if torch.is_grad_enabled():\n"  # in training only
        "        raise ValueError('no luck')\n"
        "    return whole(model, batch)\n"
    )
    result = script(
        f"""
        import os, ray_dynbs, yaml
        ray_dynbs.connect(os.environ["RAY_DYNBS_ADDRESS"])
        keys = yaml.safe_load(open({str(ROOT / "jobs/configs/digits.yaml")!r}))
        keys |= {{"epochs": 1, "cluster": {{"num_workers": 1}}}}
        for change in ({{"task": "own_task"}}, {{"task": "missing"}}, {{"epochs": 0}}, {{}}):
            try:
                run = ray_dynbs.train(keys, set=change)
                print("came to", run.status, run.epochs.num_rows)
            except (ray_dynbs.ConfigError, ray_dynbs.RunFailedError) as error:
                print("raised", type(error).__name__, error)
        """,
        environment(node),
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    raised = [line for line in result.stdout.splitlines() if line.startswith(("raised", "came to"))]
    assert raised[0] == "raised RunFailedError ValueError: no luck"
    assert raised[1].startswith("raised ConfigError task 'missing' does not import")
    assert raised[2].startswith("raised ConfigError config: epochs")
    assert raised[3] == "came to finished 1"
    assert node.leftovers() == []


COMPLAIN = """
import os, sys, time
{before}
import ray_dynbs
started = time.monotonic()
try:
    ray_dynbs.connect({address!r}, working_dir=None)
except ray_dynbs.ConfigError as error:
    print(f"{{time.monotonic() - started:.1f}} {{error}}")
"""


def complaint(address: str, variables: dict[str, str], folder: Path, before: str = "") -> tuple[float, str]:
    """How long it took to say what is wrong, and what that was."""
    result = script(COMPLAIN.format(address=address, before=before), variables, folder)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1, result.stdout
    seconds, _, words = result.stdout.strip().partition(" ")
    return float(seconds), words


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_wrong_with_a_connection_is_said_within_15_seconds(node: Head, tmp_path: Path) -> None:
    usual = environment(node)
    cases = {
        "another Ray": (
            usual,
            "import ray\nray.__version__ = '2.40.0'",
            "and Ray 2.40.0; allowed: the same Ray",
        ),
        "another Python": (
            usual,
            "import platform\nplatform.python_version = lambda: '3.12.9'",
            "here are Python 3.12.9 and Ray",
        ),
    }
    if node.with_token:
        wrong = tmp_path / "wrong"
        wrong.write_text("x" * 64)
        cases |= {
            "no token": (environment(node, token=False), "", "asks for a token, none was found"),
            "a wrong token": (usual | {"RAY_AUTH_TOKEN_PATH": str(wrong)}, "", "does not accept the token"),
            "no token by order": (usual | {"RAY_AUTH_MODE": "disabled"}, "", "RAY_AUTH_MODE is 'disabled'"),
        }
    for name, (variables, before, expected) in cases.items():
        seconds, words = complaint(node.ray_client, variables, tmp_path, before)
        assert expected in words, name
        assert seconds < 15, name
    seconds, words = complaint(f"ray://{HOST}:{node.dashboard}", usual, tmp_path)
    assert "no Ray Client answers there" in words
    assert seconds < 15
    assert node.leftovers() == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (f"{HOST}:10001", f"address is '{HOST}:10001': no scheme; allowed: ray://{HOST}:10001, or local"),
        ("head", "no scheme; allowed: ray://head:10001, or local"),
        ("http://head:8265", "not Ray Client's; allowed: ray://head:10001"),
        ("ray://head", "no host and port; allowed: ray://HOST:10001"),
        ("ray://head:0", "no host and port"),
        ("ray://{closed}", "nobody listens there (connection refused)"),
    ],
)
def test_an_address_that_is_none(address: str, expected: str, tmp_path: Path) -> None:
    closed = f"{HOST}:{free_ports(1)[0]}"
    seconds, words = complaint(address.replace("{closed}", closed), dict(os.environ), tmp_path)
    assert expected in words
    assert seconds < 15


def test_without_a_connection_it_is_said_how_to_get_one() -> None:
    import ray_dynbs

    for call in (lambda: ray_dynbs.train({}), lambda: ray_dynbs.tune({}), lambda: ray_dynbs.attach("x")):
        with pytest.raises(
            ray_dynbs.ConfigError, match=r'not connected; allowed: ray_dynbs\.connect\("ray://'
        ):
            call()
