"""Following a job whose server comes and goes: no line is lost, none is shown twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus

from ray_dynbs.cluster import jobs
from ray_dynbs.cluster.jobs import Jobs, new_job

LOG = "line 1\nline 2\nline 3\nline 4: grüße\n"


class Server:
    """Ray's client, as far as it is used: each connection gives a part of the log, and breaks.

    Args:
        connections: For each one, how many characters come, and what it ends with.
    """

    def __init__(self, connections: list[tuple[int, BaseException | None]]) -> None:
        self._connections, self.asked = connections, 0

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        count, problem = self._connections.pop(0)
        for start in range(0, count, 5):
            yield LOG[start : min(start + 5, count)]
        if problem is not None:
            raise problem

    def get_job_logs(self, job: str) -> str:
        return LOG

    def get_job_info(self, job: str) -> Any:
        self.asked += 1
        ended = not self._connections
        status = JobStatus.FAILED if ended else JobStatus.RUNNING
        return SimpleNamespace(status=status, driver_exit_code=2 if ended else None)


def follower(server: Server) -> Jobs:
    found = Jobs.__new__(Jobs)
    found.address, found._client, found._begun, found._shown = "http://head:8265", server, 0, 0
    return found


@pytest.mark.parametrize(
    "connections",
    [
        [(len(LOG), None)],
        [(12, ConnectionError("gone")), (len(LOG), None)],
        [(12, RuntimeError("closed")), (7, ConnectionError("gone")), (20, None), (len(LOG), None)],
        [(12, ConnectionError("gone"))],  # and the job ended meanwhile
        [(0, OSError("gone"))],
    ],
)
def test_every_line_once(
    connections: list[tuple[int, BaseException | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)
    shown: list[str] = []
    assert follower(Server(list(connections))).follow("job", shown.append) == 2
    assert "".join(shown) == LOG


def test_an_interrupt_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)
    shown: list[str] = []
    followed = follower(Server([(12, KeyboardInterrupt()), (len(LOG), None)]))
    with pytest.raises(KeyboardInterrupt):
        followed.follow("job", shown.append)
    assert followed.follow("job", shown.append) == 2
    assert "".join(shown) == LOG


def test_what_cannot_be_written_is_raised() -> None:
    def full(text: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    followed = follower(Server([(12, None), (len(LOG), None)]))
    with pytest.raises(BrokenPipeError):
        followed.follow("job", full)


def test_ids_are_words() -> None:
    assert new_job("my run/ü.1").startswith("my-run-1-") or new_job("my run/ü.1").startswith("my-run-")
    assert new_job("a") != new_job("a")
