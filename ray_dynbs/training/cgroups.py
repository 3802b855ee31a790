"""Memory limits of the control groups (v1 and v2) that a process is in: its own, and all those around it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 1 << 60
"""v1 writes a number near 2**63 where there is no limit."""


@dataclass(frozen=True)
class Limit:
    """The tightest limit around a process.

    Attributes:
        used_bytes: Used in that group, without file cache that the kernel drops first.
        max_bytes: Allowed in it; ``None`` without any limit.
        source: The group, in words.
        doubts: What could not be read.
    """

    used_bytes: int = 0
    max_bytes: int | None = None
    source: str = "no limit"
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Names:
    """What the files of a version are called; above ``slowed`` processes all but stand still."""

    version: str
    limit: str
    used: str
    cache: str
    slowed: str = ""


_V2 = _Names("v2", "memory.max", "memory.current", "inactive_file", "memory.high")
_V1 = _Names("v1", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def tightest_limit(root: Path = ROOT, own: Path = OWN) -> Limit:
    """The limit with the least room left in it.

    Args:
        root: Where the hierarchies are mounted.
        own: The file that names this process's groups.
    """
    doubts: list[str] = []
    found: list[Limit] = []
    for folder, names in _groups(root, own, doubts):
        limit = _limit_of(folder, names, doubts)
        if limit is not None:
            found.append(limit)
    least = min(found, key=lambda each: (each.max_bytes or 0) - each.used_bytes, default=Limit())
    return Limit(least.used_bytes, least.max_bytes, least.source, tuple(doubts))


def _groups(root: Path, own: Path, doubts: list[str]) -> list[tuple[Path, _Names]]:
    """The groups of this process in the mounted hierarchies, from the innermost to the root of the mount.

    In a container the mount may show its own group as the root, while the path names it as the host does:
    then the path does not exist in the mount, and its root is the group.
    """
    groups: list[tuple[Path, _Names]] = []
    for line in (_read(own, doubts) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            groups += [(folder, _V2) for folder in _upwards(root, path)]
        elif "memory" in controllers.split(","):
            groups += [(folder, _V1) for folder in _upwards(root / "memory", path)]
    return groups or [(root, _V2), (root / "memory", _V1)]


def _upwards(mount: Path, path: str) -> list[Path]:
    inner = mount / path.lstrip("/")
    if ".." in Path(path).parts or not inner.is_dir():
        return [mount]
    return [inner, *(parent for parent in inner.parents if parent.is_relative_to(mount))]


def _limit_of(folder: Path, names: _Names, doubts: list[str]) -> Limit | None:
    """The limit of one group; ``None`` where it has none, or says nothing."""
    limits = [_number(folder / name, doubts) for name in (names.limit, names.slowed) if name]
    limit = min((each for each in limits if each is not None), default=None)
    if limit is None or limit >= _NO_LIMIT_BYTES:
        return None
    used = _number(folder / names.used, doubts)
    if used is None:
        doubts.append(f"{folder / names.used}: not there, so the limit of {limit} bytes is not used")
        return None
    cache = _statistic(folder / "memory.stat", names.cache, doubts)
    return Limit(max(used - cache, 0), limit, f"cgroup {names.version} {folder}")


def _read(path: Path, doubts: list[str]) -> str | None:
    """A file's text; ``None`` where it does not exist, or may not be read, which is a doubt."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        doubts.append(f"{path}: {error.strerror}")
    except UnicodeDecodeError:
        doubts.append(f"{path}: no text")
    return None


def _number(path: Path, doubts: list[str]) -> int | None:
    """A file that holds a number; ``None`` for ``max`` and where there is none."""
    text = (_read(path, doubts) or "").strip()
    return int(text) if _is_number(text) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _statistic(path: Path, key: str, doubts: list[str]) -> int:
    lines = (_read(path, doubts) or "").splitlines()
    values = [line.split() for line in lines]
    return next((int(v[1]) for v in values if len(v) == 2 and v[0] == key and _is_number(v[1])), 0)
