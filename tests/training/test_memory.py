"""Memory readings: control groups as recorded from machines, the process's own share, and peaks."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from ray_dynbs.training import cgroups, memory
from ray_dynbs.training.cgroups import Limit, tightest_limit
from ray_dynbs.training.memory import (
    MemoryReading,
    MemoryWatch,
    PeakMeter,
    read_host_memory,
    read_memory,
    usable_fraction,
)
from tests.control_groups import control_group, run_script

CPU = torch.device("cpu")
GB = 2**30
V1_UNLIMITED = "9223372036854771712"


def group(folder: Path, **files: str) -> None:
    """Files of a control group; ``__`` in a name is a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def v2(folder: Path, limit: object, used: int, cache: int = 0) -> None:
    stat = f"anon {used - cache}\nfile {cache}\nactive_file 0\ninactive_file {cache}"
    group(folder, memory__max=str(limit), memory__current=str(used), memory__stat=stat)


def v1(folder: Path, limit: object, used: int, cache: int = 0) -> None:
    stat = f"cache {cache}\ninactive_file 7\ntotal_cache {cache}\ntotal_inactive_file {cache}"
    group(folder, memory__limit_in_bytes=str(limit), memory__usage_in_bytes=str(used), memory__stat=stat)


def own(folder: Path, *lines: str) -> Path:
    path = folder / "own"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_v2_counts_no_cache_that_can_be_dropped(tmp_path: Path) -> None:
    v2(tmp_path / "cg", 8 * GB, 6 * GB, 2 * GB)
    found = tightest_limit(tmp_path / "cg", own(tmp_path, "0::/"))
    assert (found.used_bytes, found.max_bytes, found.doubts) == (4 * GB, 8 * GB, ())
    assert "cgroup v2" in found.source


def test_v1_of_docker_whose_path_is_the_hosts(tmp_path: Path) -> None:
    """The container sees its own group as the mount's root; the path names it as the host does."""
    v1(tmp_path / "cg" / "memory", 4 * GB, 3 * GB, GB)
    path = own(
        tmp_path, "12:cpu,cpuacct:/docker/4f2a", "9:memory:/docker/4f2a", "1:name=systemd:/docker/4f2a"
    )
    found = tightest_limit(tmp_path / "cg", path)
    assert (found.used_bytes, found.max_bytes) == (2 * GB, 4 * GB)
    assert "cgroup v1" in found.source


def test_no_limit_in_either_version(tmp_path: Path) -> None:
    v2(tmp_path / "two", "max", GB)
    assert tightest_limit(tmp_path / "two", own(tmp_path, "0::/")) == Limit()
    v1(tmp_path / "one" / "memory", V1_UNLIMITED, GB)
    assert tightest_limit(tmp_path / "one", own(tmp_path, "4:memory:/")) == Limit()
    assert tightest_limit(tmp_path / "none", own(tmp_path, "0::/")) == Limit()
    assert tightest_limit(tmp_path / "none", tmp_path / "nowhere") == Limit()


def test_of_nested_limits_the_one_with_the_least_room_counts(tmp_path: Path) -> None:
    """A pod's limit lies above its containers'; a slice of systemd's above a service's."""
    root = tmp_path / "cg"
    v2(root, "max", 20 * GB)
    v2(root / "kubepods", 16 * GB, 15 * GB)
    v2(root / "kubepods" / "pod7", 8 * GB, 4 * GB)
    v2(root / "kubepods" / "pod7" / "main", "max", 3 * GB)
    found = tightest_limit(root, own(tmp_path, "0::/kubepods/pod7/main"))
    assert (found.used_bytes, found.max_bytes) == (15 * GB, 16 * GB)  # 1 GB left in it, 4 GB in the pod
    v2(root / "kubepods", 64 * GB, 15 * GB)
    found = tightest_limit(root, own(tmp_path, "0::/kubepods/pod7/main"))
    assert (found.used_bytes, found.max_bytes) == (4 * GB, 8 * GB)


def test_where_the_kernel_slows_processes_down_is_a_limit_too(tmp_path: Path) -> None:
    """``MemoryHigh`` of systemd, Kubernetes' memory quality of service: above it all but stand still."""
    v2(tmp_path / "cg", 8 * GB, 3 * GB)
    for high, expected in ((6 * GB, 6 * GB), ("max", 8 * GB), (9 * GB, 8 * GB)):
        group(tmp_path / "cg", memory__high=str(high))
        assert tightest_limit(tmp_path / "cg", own(tmp_path, "0::/")).max_bytes == expected
    v2(tmp_path / "cg", "max", 3 * GB)
    group(tmp_path / "cg", memory__high=str(5 * GB))
    assert tightest_limit(tmp_path / "cg", own(tmp_path, "0::/")).max_bytes == 5 * GB


def test_hybrid_machines_keep_memory_in_v1(tmp_path: Path) -> None:
    v1(tmp_path / "cg" / "memory" / "job", 2 * GB, GB)
    (tmp_path / "cg" / "unified").mkdir()
    found = tightest_limit(tmp_path / "cg", own(tmp_path, "4:memory:/job", "0::/job"))
    assert (found.used_bytes, found.max_bytes) == (GB, 2 * GB)


def test_a_path_that_leaves_the_mount_is_not_followed(tmp_path: Path) -> None:
    v2(tmp_path / "cg", 8 * GB, GB)
    v2(tmp_path / "else", GB, GB)
    found = tightest_limit(tmp_path / "cg", own(tmp_path, "0::/../else"))
    assert found.max_bytes == 8 * GB


def test_what_may_not_be_read_is_a_doubt_and_the_host_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v2(tmp_path / "cg", 8 * GB, GB)
    usual = Path.read_text

    def forbidden(path: Path, *arguments: object, **more: object) -> str:
        if path.name == "memory.max":
            raise PermissionError(13, "Permission denied")
        return usual(path, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", forbidden)
    found = tightest_limit(tmp_path / "cg", own(tmp_path, "0::/"))
    assert found.max_bytes is None
    assert found.doubts == (f"{tmp_path}/cg/memory.max: Permission denied",)
    reading = read_host_memory(found)
    assert reading.source == "host"
    assert reading.doubts == found.doubts
    assert reading.total_bytes == psutil.virtual_memory().total


def test_files_that_are_missing_or_odd(tmp_path: Path) -> None:
    group(tmp_path / "cg", memory__max="1000")
    found = tightest_limit(tmp_path / "cg", own(tmp_path, "0::/"))
    assert found.max_bytes is None
    assert "memory.current: not there" in found.doubts[0]
    group(tmp_path / "cg", memory__current="600", memory__stat="inactive_file\nnonsense\ninactive_file many")
    assert tightest_limit(tmp_path / "cg", own(tmp_path, "0::/")).used_bytes == 600


def test_the_container_counts_only_where_it_is_tighter_than_the_host() -> None:
    host = psutil.virtual_memory().total
    tight = read_host_memory(Limit(GB // 2, GB, "cgroup v2 /x"))
    assert (tight.used_bytes, tight.total_bytes, tight.source) == (GB // 2, GB, "cgroup v2 /x")
    assert tight.fraction == 0.5
    wide = read_host_memory(Limit(GB, 2 * host, "cgroup v2 /x"))
    assert (wide.total_bytes, wide.source) == (host, "host")


def test_this_machine() -> None:
    reading = read_memory(CPU)
    assert 0 < reading.own_bytes <= reading.used_bytes + GB
    assert 0 < reading.fraction < 1
    assert reading.fraction == pytest.approx(MemoryWatch(CPU).fraction(), abs=0.05)
    assert cgroups.ROOT.exists() or reading.source == "host"


def test_an_allocator_that_had_to_retry_was_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is free afterwards; and a count that began anew is no retry."""
    readings = [MemoryReading(1, 10, 1, "device", retries=retries) for retries in (2, 2, 3, 3, 0, 1)]
    monkeypatch.setattr(memory, "read_memory", lambda device: readings.pop(0))
    watch = MemoryWatch(torch.device("cuda"))
    assert [watch.fraction() for _ in range(5)] == [0.1, 1.0, 0.1, 0.1, 1.0]


SHARES = """
from multiprocessing import shared_memory
import torch
from ray_dynbs.training.memory import PeakMeter, read_memory

cpu, size = torch.device("cpu"), 300 * 2**20
meter = PeakMeter(cpu)
meter.reset()
before, peak = read_memory(cpu), meter.peak_bytes()
segment = shared_memory.SharedMemory(create=True, size=size)
segment.buf[:] = bytes(size)
after = read_memory(cpu)
print(after.source, after.total_bytes)
print((after.used_bytes - before.used_bytes) / size)
print((after.own_bytes - before.own_bytes) / size)
print((meter.peak_bytes() - peak) / size)
segment.close()
segment.unlink()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_shared_memory_is_in_use_but_nobodys_own() -> None:
    """Ray's object store lies there: it counts in the container, but who maps it does not hold it."""
    with control_group(GB) as group:
        code, lines, err = run_script(SHARES, limited_by=group)
    assert code == 0, err
    assert lines[0].startswith("cgroup v")
    assert lines[0].endswith(str(GB))
    used, own, peak = map(float, lines[1:])
    assert 0.9 < used < 1.3
    assert abs(own) < 0.1
    assert abs(peak) < 0.2


def test_rays_own_memory_monitor_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_memory_usage_threshold", raising=False)
    assert usable_fraction(CPU, 0.1) == pytest.approx(0.855)
    assert usable_fraction(CPU, 0.99) > 0
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.7")
    assert usable_fraction(CPU, 0.1) == pytest.approx(0.63)
    assert usable_fraction(torch.device("cuda"), 0.1) == pytest.approx(0.9)
    monkeypatch.setenv("RAY_memory_usage_threshold", "nonsense")
    assert usable_fraction(CPU, 0.1) == pytest.approx(0.855)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs /proc/self/clear_refs")
def test_a_peak_is_that_since_the_last_reset() -> None:
    meter, size = PeakMeter(CPU), 200 * 2**20
    meter.reset()
    before = meter.peak_bytes()
    large = torch.ones(size // 4)
    del large
    assert size * 0.9 < meter.peak_bytes() - before < size * 1.5
    meter.reset()
    assert meter.peak_bytes() - before < size // 2
