"""The benchmark jobs still run, and write what they say they write; their figures are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOBS = sorted((Path(__file__).parents[1] / "jobs").glob("bench_*.py"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_a_benchmark_runs(job: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(job), "--quick", "--json", str(tmp_path / "figures.json")],
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures
    for row in figures:
        assert {"case", "unit", "ours", "baseline", "baseline_name"} <= row.keys()
        assert row["ours"] > 0
