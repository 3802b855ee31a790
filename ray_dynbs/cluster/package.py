"""What is sent to a cluster: a folder without what does not belong there, and this package beside it."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pathspec

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.storage.run_directory import CONFIG, DECISIONS, EPOCHS
from ray_dynbs.storage.search_directory import TRIAL_FOLDERS, TRIALS

PACKAGE = Path(__file__).parents[1]
IGNORE_FILES = (".gitignore", ".rayignore")
SKIPPED = frozenset({".git", ".hg", ".svn", ".ipynb_checkpoints", "__pycache__", "node_modules"})
SECRET = frozenset({".ssh", ".aws", ".ray", ".gnupg", ".kube", ".netrc", ".env"})
"""Never sent, unless the configuration itself names what lies there."""
CHUNK_BYTES = 2**20
MOST_BYTES = 512 * 2**20
"""What Ray takes as one package; more belongs into an image or a bucket."""
LARGEST_SHOWN = 3


@dataclass(frozen=True)
class Package:
    """Files of a folder, and those of this package if the folder has no copy of it.

    Attributes:
        folder: What is sent.
        files: Name in the package (with ``/``) -> file.
        left_out: Folders and files that stay behind, as names in the folder; what lies in them is not named.
    """

    folder: Path
    files: dict[str, Path]
    left_out: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all files before packing."""
        return sum(path.stat().st_size for path in self.files.values())

    def write(self, target: Path) -> None:
        """Write it as a zip archive, whose bytes depend on names and contents only.

        Raises:
            ConfigError: it is larger than Ray takes, with the largest files; or one cannot be read.
        """
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
            for name in sorted(self.files):
                try:
                    self._add(archive, name, target)
                except (OSError, UnicodeError) as error:
                    reason = getattr(error, "strerror", None) or "its name is no text"
                    raise ConfigError(
                        f"{self.files[name]!s}: cannot be sent ({reason}); name it in .rayignore"
                    ) from error

    def _add(self, archive: zipfile.ZipFile, name: str, target: Path) -> None:
        path = self.files[name]
        entry = zipfile.ZipInfo(name)  # dated 1980: unchanged files are not uploaded again
        entry.compress_type = zipfile.ZIP_DEFLATED
        entry.external_attr = stat.S_IMODE(path.stat().st_mode) << 16
        with path.open("rb") as source, archive.open(entry, "w", force_zip64=True) as packed:
            while chunk := source.read(CHUNK_BYTES):
                packed.write(chunk)
                if target.stat().st_size > MOST_BYTES:
                    break
        if target.stat().st_size > MOST_BYTES:
            raise ConfigError(self._too_large())

    def _too_large(self) -> str:
        sizes = sorted(((path.stat().st_size, name) for name, path in self.files.items()), reverse=True)
        largest = ", ".join(f"{name} ({size / 2**20:,.0f} MB)" for size, name in sizes[:LARGEST_SHOWN])
        return (
            f"{self.folder}: packs to more than the {MOST_BYTES // 2**20} MB that Ray takes; the largest: "
            f"{largest}; allowed: names in .rayignore, data by URI"
        )


def make_package(folder: Path, needed: Iterable[Path] = ()) -> Package:
    """Choose what to send of a folder.

    Left out are virtual environments, caches, version control, run and search directories, and what
    ``.gitignore`` and ``.rayignore`` name, as Ray does; but not what is needed.

    Args:
        folder: What is sent.
        needed: Files and folders that are sent in any case, where they exist.

    Raises:
        ConfigError: it is no folder, or something needed lies elsewhere.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no folder; allowed: the folder to send to the cluster")
    if folder in (Path.home().resolve(), Path(folder.anchor)):
        raise ConfigError(f"{folder}: is not sent as a whole; allowed: a folder of the project in it")
    wanted = [inside(folder, path) for path in needed]
    files: dict[str, Path] = {}
    left_out: list[str] = []
    for path, kept in _walk(folder, [], frozenset()):
        name = path.relative_to(folder).as_posix()
        if kept:
            files[name] = path
        else:
            left_out.append(name)
    for path in wanted:
        inner = [path] if path.is_file() else []
        if path.is_dir():
            inner = [each for each, kept in _walk(path, [], frozenset()) if kept]
        files.update({each.relative_to(folder).as_posix(): each for each in inner if each.is_file()})
    if not any(name.startswith(f"{PACKAGE.name}/__init__.py") for name in files):
        for path, kept in _walk(PACKAGE, [], frozenset()):
            if kept:
                files[f"{PACKAGE.name}/{path.relative_to(PACKAGE).as_posix()}"] = path
    behind = [name for name in left_out if not any(sent.startswith(f"{name}/") for sent in files)]
    return Package(folder, files, tuple(behind))


def inside(folder: Path, path: Path) -> Path:
    """The same path, as one within a folder.

    Raises:
        ConfigError: it lies elsewhere.
    """
    found = Path(os.path.abspath(path))
    if not found.is_relative_to(folder):
        found = found.resolve()
    if not found.is_relative_to(folder):
        raise ConfigError(f"{path}: lies outside of the folder that is sent, {folder}; allowed: a path in it")
    return found


Ignored = Callable[[Path], bool]


def _walk(folder: Path, ignored: Sequence[Ignored], above: frozenset[Path]) -> Iterator[tuple[Path, bool]]:
    """Every file with whether it is sent; a folder that is not sent is named itself, once.

    Raises:
        ConfigError: something that cannot be read.
    """
    real = folder.resolve()
    if real in above:  # a link to a folder around itself
        return
    rules = [*ignored, *_rules_of(folder)]
    try:
        entries = [(entry, entry.is_dir(), entry.is_file()) for entry in sorted(folder.iterdir())]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror}); name it in .rayignore") from error
    for entry, is_folder, is_file in entries:
        if any(rule(entry) for rule in rules) or entry.name in SECRET or (is_folder and _stays_behind(entry)):
            yield entry, False
        elif is_folder:
            yield from _walk(entry, rules, above | {real})
        elif is_file:
            yield entry, True


def _rules_of(folder: Path) -> list[Ignored]:
    """What the ignore files of a folder say."""
    rules = []
    for name in IGNORE_FILES:
        file = folder / name
        if file.is_file():
            lines = file.read_text(errors="replace").splitlines()
            try:
                spec = pathspec.GitIgnoreSpec.from_lines(lines)
            except ValueError as error:
                raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
            rules.append(_matcher(spec, folder))
    return rules


def _matcher(spec: pathspec.GitIgnoreSpec, folder: Path) -> Ignored:
    def ignored(path: Path) -> bool:
        name = PurePosixPath(path.relative_to(folder)).as_posix()
        return spec.match_file(f"{name}/" if path.is_dir() else name)

    return ignored


def _stays_behind(folder: Path) -> bool:
    """Whether a folder is none of the user's sources."""
    if folder.name in SKIPPED or (folder / "pyvenv.cfg").is_file() or (folder / "CACHEDIR.TAG").is_file():
        return True
    record = (folder / CONFIG).is_file()
    return record and any((folder / name).exists() for name in (DECISIONS, EPOCHS, TRIALS, TRIAL_FOLDERS))
