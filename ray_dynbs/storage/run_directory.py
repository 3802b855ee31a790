"""A run's directory on any pyarrow filesystem: a local folder or a bucket.

Nothing is appended in place. Files are replaced as a whole: on file systems through a temporary name
and a rename, on object stores by one upload, which is visible only when it is complete.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from ray_dynbs.core.decision import Decision
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.journal import decode_lines
from ray_dynbs.storage.tables import EPOCH_SCHEMA, EVALUATION_SCHEMA, read_table, table_bytes

CONFIG = "config.yaml"
DECISIONS = "decisions.jsonl"
EPOCHS = "epochs.parquet"
EVALUATIONS = "evaluations.parquet"
MODEL = "model.pt"
CHECKPOINTS = "checkpoints"
EARLIER_CONFIGS = "earlier_configs"
"""Configurations that no longer hold, each named by the first incarnation it did not hold for."""

_OBJECT_STORES = ("s3", "gcs", "abfs")
JOB_FOLDERS = "working_dir_files"
"""Ray's folder for its copies of the folders that jobs were submitted with."""


@dataclass(frozen=True)
class RunDirectory:
    """One run's directory.

    Attributes:
        uri: As the user would write it: a path or a URI.
    """

    uri: str

    @classmethod
    def create(cls, out: str, name: str) -> RunDirectory:
        """A new directory ``<out>/<name>``, with a number appended where that exists already.

        Raises:
            ConfigError: ``out`` cannot be written.
        """
        number = 1 + max((number for number, _ in cls._existing(out, name)), default=0)
        while True:
            run = cls(_join(out, name if number == 1 else f"{name}-{number}"))
            try:
                if run._claim():
                    return run
            except OSError as error:
                raise ConfigError(f"out: cannot write to {run.uri}: {error}") from error
            number += 1

    @classmethod
    def newest(cls, out: str, name: str) -> RunDirectory:
        """The run of this name with the highest number.

        Raises:
            ConfigError: there is none.
        """
        existing = [item for item in cls._existing(out, name) if item[1]._is_named(name)]
        if not existing:
            raise ConfigError(f"--resume: no run named {name!r} in {out!r}; start one without --resume")
        return max(existing, key=lambda item: item[0])[1]

    @classmethod
    def open(cls, uri: str) -> RunDirectory:
        """An existing run.

        Raises:
            ConfigError: it holds no ``config.yaml``.
        """
        run = cls(uri.rstrip("/"))
        if not run.exists(CONFIG):
            raise ConfigError(f"{uri}: not a run directory (it has no {CONFIG})")
        return run

    @classmethod
    def _existing(cls, out: str, name: str) -> list[tuple[int, RunDirectory]]:
        filesystem, path = _resolve(out)
        entries = filesystem.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        found = []
        for entry in entries:
            match = re.fullmatch(re.escape(name) + r"(?:-(\d+))?", entry.base_name)
            if match and entry.type == pafs.FileType.Directory:
                found.append((int(match[1] or 1), cls(_join(out, entry.base_name))))
        return found

    def _claim(self) -> bool:
        """Make the directory; ``False`` where another run was faster (an object store cannot tell)."""
        filesystem, path = self._resolve()
        if filesystem.type_name == "local":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            try:
                Path(path).mkdir()
            except FileExistsError:
                return False
        else:
            filesystem.create_dir(path, recursive=True)
        self.write_text(".writable", "")
        filesystem.delete_file(f"{path}/.writable")
        return True

    def make(self) -> None:
        """Make the directory where it does not exist yet."""
        filesystem, path = self._resolve()
        filesystem.create_dir(path, recursive=True)

    def remove(self) -> None:
        """Delete the directory with everything in it."""
        filesystem, path = self._resolve()
        filesystem.delete_dir(path)

    def _is_named(self, name: str) -> bool:
        """Whether its configuration bears this name: ``digits-2`` may also be a name of its own."""
        return f"\nname: {name}\n" in f"\n{self.read_text(CONFIG)}"

    @property
    def name(self) -> str:
        """Its last path component."""
        return self.uri.rstrip("/").rsplit("/", 1)[-1]

    @property
    def absolute_uri(self) -> str:
        """The same directory, whatever the working directory."""
        return self.uri if "://" in self.uri else self._resolve()[1]

    def exists(self, file: str) -> bool:
        """Whether a file or folder of the run exists."""
        filesystem, path = self._resolve()
        return bool(filesystem.get_file_info(f"{path}/{file}").type != pafs.FileType.NotFound)

    def names_in(self, folder: str) -> list[str]:
        """Names of what lies in a folder of the run, in order; none where it does not exist."""
        filesystem, path = self._resolve()
        entries = filesystem.get_file_info(pafs.FileSelector(f"{path}/{folder}", allow_not_found=True))
        return sorted(entry.base_name for entry in entries)

    def read_text(self, file: str) -> str:
        """A text file of the run; empty where it does not exist yet."""
        if not self.exists(file):
            return ""
        return self.read_bytes(file).decode()

    def read_bytes(self, file: str) -> bytes:
        """A file of the run.

        Raises:
            FileNotFoundError: it does not exist.
        """
        filesystem, path = self._resolve()
        with filesystem.open_input_stream(f"{path}/{file}") as stream:
            return bytes(stream.read())

    def write_text(self, file: str, text: str) -> None:
        """Replace a text file."""
        self.write_bytes(file, text.encode())

    def write_bytes(self, file: str, data: bytes) -> None:
        """Replace a file as a whole: a reader sees the old or the new one."""
        filesystem, path = self._resolve()
        target = f"{path}/{file}"
        if "/" in file:
            filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        direct = filesystem.type_name in _OBJECT_STORES
        with filesystem.open_output_stream(target if direct else f"{target}.tmp") as stream:
            stream.write(data)
        if not direct:
            filesystem.move(f"{target}.tmp", target)

    def read_epochs(self) -> list[dict[str, Any]]:
        """The rows of ``epochs.parquet``; none where it does not exist yet."""
        return self.read_rows(EPOCHS)

    def write_epochs(self, rows: list[dict[str, Any]]) -> None:
        """Replace ``epochs.parquet``."""
        self.write_bytes(EPOCHS, table_bytes(pa.Table.from_pylist(rows, schema=EPOCH_SCHEMA)))

    def read_evaluations(self) -> list[dict[str, Any]]:
        """The rows of ``evaluations.parquet``, those within epochs; none where it does not exist."""
        return self.read_rows(EVALUATIONS)

    def write_evaluations(self, rows: list[dict[str, Any]]) -> None:
        """Replace ``evaluations.parquet``."""
        self.write_bytes(EVALUATIONS, table_bytes(pa.Table.from_pylist(rows, schema=EVALUATION_SCHEMA)))

    def read_rows(self, file: str) -> list[dict[str, Any]]:
        """The rows of a Parquet file of the run; none where it does not exist.

        Raises:
            ConfigError: it is damaged.
        """
        if not self.exists(file):
            return []
        rows: list[dict[str, Any]] = read_table(self.read_bytes(file), f"{self.uri}/{file}").to_pylist()
        return rows

    def read_decisions(self) -> list[Decision]:
        """The journal, ``decisions.jsonl``; empty where it does not exist yet.

        Raises:
            ConfigError: it is damaged.
        """
        return decode_lines(self.read_text(DECISIONS), f"{self.uri}/{DECISIONS}")

    def _resolve(self) -> tuple[pafs.FileSystem, str]:
        return _resolve(self.uri)


def in_job_folder() -> bool:
    """Whether the working directory is a copy that Ray has made for a job."""
    return JOB_FOLDERS in Path.cwd().parts


def lasting(path: str) -> str:
    """A path for what is to be kept, given one as the user wrote it.

    The working directory of a job is a copy that Ray throws away after it: there, a relative path starts
    where Ray Train puts its own results, in ``~/ray_results``. Anywhere else it stays as it is.

    Args:
        path: A local path, or a URI, which stays as it is.
    """
    if "://" in path or not in_job_folder():
        return path
    return (Path.home() / "ray_results" / Path(path).expanduser()).as_posix()


def check_writable(out: str) -> None:
    """See, without writing, that run directories can be made in a local folder.

    An object store is only found out when the run begins.

    Raises:
        ConfigError: something on the way is no folder, or may not be written.
    """
    filesystem, path = _resolve(out)
    if filesystem.type_name != "local":
        return
    existing = next(p for p in (Path(path), *Path(path).parents) if p.exists())
    if not existing.is_dir():
        raise ConfigError(f"out is {out!r}: {existing} is a file; allowed: a folder or a URI")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"out is {out!r}: {existing} may not be written by this user")


def _join(out: str, name: str) -> str:
    return f"{out.rstrip('/')}/{name}"


def _resolve(uri: str) -> tuple[pafs.FileSystem, str]:
    """Filesystem and path of a URI or local path.

    Raises:
        ConfigError: a scheme pyarrow does not know.
    """
    if "://" not in uri:
        return pafs.LocalFileSystem(), Path(uri).expanduser().absolute().as_posix()
    try:
        filesystem, path = pafs.FileSystem.from_uri(uri.replace(" ", "%20"))
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{uri}: {error}") from error
    return filesystem, path.rstrip("/")
