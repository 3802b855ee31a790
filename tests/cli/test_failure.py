"""The cause of a failed run is named before its consequences."""

from __future__ import annotations

import pytest
from ray.exceptions import RayTaskError
from ray.train import WorkerGroupError

from ray_dynbs.cli.failure import report_failure
from ray_dynbs.core.errors import ConfigError


def first_line(capsys: pytest.CaptureFixture[str], failures: dict[int, Exception]) -> list[str]:
    report_failure(WorkerGroupError("the whole story", failures))
    return capsys.readouterr().err.splitlines()


def test_the_worker_that_failed_first_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    lost = RuntimeError("[gloo/transport] Connection closed by peer [127.0.0.1]:4242")
    lines = first_line(capsys, {0: lost, 1: KeyError("pixels"), 2: lost})
    assert lines[0] == "error (worker 1): KeyError: 'pixels'"
    assert lines[-1] == "the whole story"
    assert first_line(capsys, {1: lost})[0].startswith("error (worker 1): RuntimeError: [gloo/transport]")


def test_what_ray_puts_around_a_cause_is_taken_off(capsys: pytest.CaptureFixture[str]) -> None:
    wrapped = RayTaskError("decide", "a long traceback", AttributeError("no such size"))
    assert first_line(capsys, {0: wrapped})[0] == "error (worker 0): AttributeError: no such size"


def test_wrong_input_needs_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    lines = first_line(capsys, {0: ConfigError("column 'x' is missing")})
    assert lines == ["error (worker 0): ConfigError: column 'x' is missing"]


def test_a_failure_without_workers(capsys: pytest.CaptureFixture[str]) -> None:
    report_failure(RuntimeError("the head node is gone"))
    assert capsys.readouterr().err.splitlines()[0] == "error: RuntimeError: the head node is gone"
