"""Head nodes as ``ray start --head`` makes them: a private cluster with a job server and Ray Client."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

ROOT = Path(__file__).parents[1]
READY_S = 90
HOST = "127.0.0.1"
RAYS_OWN = ("_StatsActor", "_AutoscalingCoordinatorActor")
"""Ray Data makes these once for all jobs of a cluster, and keeps them."""

OPEN, WITH_TOKEN = (
    pytest.mark.parametrize("node", [asked], ids=[name], indirect=True)
    for asked, name in ((False, "open"), (True, "token"))
)
"""For what is the same with and without a token, once the head is reached: the fixture ``node`` on one."""


class Head:
    """A head node in a folder of its own, its home included.

    Args:
        folder: An empty folder.
        with_token: Whether it asks for a token.
        num_cpus: CPUs it says it has.
    """

    def __init__(self, folder: Path, *, with_token: bool, num_cpus: int = 2) -> None:
        self.folder, self.with_token = folder, with_token
        self.home = folder / "home"
        self.home.mkdir()
        self.token = folder / "token"
        self.token.write_text(uuid.uuid4().hex * 2)
        self.gcs, self.client, self.dashboard, self.metrics = free_ports(4)
        self.temp = tempfile.mkdtemp(prefix="rdb-", dir="/tmp")  # short: sockets have at most 107 characters
        command = [
            *(
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "start",
                "--head",
                "--block",
                "--disable-usage-stats",
            ),
            *("--node-ip-address", HOST, "--port", self.gcs, "--ray-client-server-port", self.client),
            *("--dashboard-port", self.dashboard, "--metrics-export-port", self.metrics),
            *("--include-dashboard", "true", "--num-cpus", num_cpus, "--temp-dir", self.temp),
            *("--object-store-memory", 300 * 2**20),
        ]
        self.log = folder / "head.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
                env=self.environment(token=with_token) | {"RAY_metrics_report_interval_ms": "1000"},
            )

    @property
    def jobs(self) -> str:
        return f"http://{HOST}:{self.dashboard}"

    @property
    def ray_client(self) -> str:
        return f"ray://{HOST}:{self.client}"

    def environment(self, *, token: bool, mode: str | None = None) -> dict[str, str]:
        """Of a process with this node's home; with its token where that is asked for.

        Args:
            token: Whether the token can be found.
            mode: ``RAY_AUTH_MODE``; left out, the process does not know that there is authentication.
        """
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        binaries = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
        if mode is None and token is self.with_token:
            mode = "token" if token else "disabled"
        return {
            **kept,
            "HOME": str(self.home),
            "PATH": binaries,
            "PYTHONUNBUFFERED": "1",
            **({"RAY_AUTH_TOKEN_PATH": str(self.token)} if token else {}),
            **({"RAY_AUTH_MODE": mode} if mode else {}),
        }

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token.read_text()}"} if self.with_token else {}

    def get(self, path: str) -> Any:
        answer = requests.get(f"{self.jobs}{path}", headers=self.headers(), timeout=10)
        answer.raise_for_status()
        return answer.json()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                self.get("/api/version")
                socket.create_connection((HOST, self.client), timeout=1).close()
                return
            except (OSError, requests.RequestException):
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.3)

    def leftovers(self, patience_s: float = 45) -> list[str]:
        """What still runs or is held on the node; waits for it to go."""
        deadline = time.monotonic() + patience_s
        while True:
            found = self._held()
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(1)

    def _held(self) -> list[str]:
        actors = self.get("/api/v0/actors?limit=1000")["data"]["result"]["result"]
        groups = self.get("/api/v0/placement_groups?limit=1000")["data"]["result"]["result"]
        alive = [
            f"actor {each['class_name']} {each['state']}"
            for each in actors
            if each["state"] != "DEAD" and each["class_name"] not in RAYS_OWN
        ]
        alive += [f"placement group {each['state']}" for each in groups if each["state"] != "REMOVED"]
        family = psutil.Process(self.process.pid).children(recursive=True)
        names = [" ".join(each.cmdline()) for each in family if each.status() != psutil.STATUS_ZOMBIE]
        return alive + [name.strip() for name in names if _works(name)]

    def end(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True)
        for each in family:
            each.terminate()
        _, alive = psutil.wait_procs(family, timeout=5)
        for each in alive:
            each.kill()
        self.process.kill()
        self.process.wait(timeout=10)


def _works(command: str) -> bool:
    """Whether a process of a node does something for somebody."""
    idle = any(word in command for word in ("IDLE", "Agent", *RAYS_OWN))
    return "ray_dynbs" in command or ("ray::" in command and not idle)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@contextmanager
def head(*, with_token: bool) -> Iterator[Head]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        node = Head(Path(folder), with_token=with_token)
        try:
            node.wait_until_ready()
            yield node
        finally:
            node.end()
            shutil.rmtree(node.temp, ignore_errors=True)
