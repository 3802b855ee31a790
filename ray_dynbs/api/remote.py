"""Runs and searches on a connected cluster, started and followed from a notebook or a script.

The driver of a run lives on the cluster (``cluster/remote.py``): what is here only watches.
"""

from __future__ import annotations

import atexit
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import ray
import yaml

from ray_dynbs.api.results import Record, RunRecord, SearchRecord
from ray_dynbs.cluster.connection import Connection
from ray_dynbs.cluster.remote import RUN_KIND, SEARCH_KIND, Watch, find_driver, find_record, start_driver
from ray_dynbs.config import Config
from ray_dynbs.config.load import dump_yaml, make_config, name_of_file, read_yaml, set_key
from ray_dynbs.config.search import Candidates, parse_search
from ray_dynbs.core.decision import Decision
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.report.events import EPOCH, MARK, RUN, TRIAL, read_event
from ray_dynbs.report.live import make_view
from ray_dynbs.report.trials import make_trial_view

STATUS = {0: "finished", 1: "failed", 2: "failed", 130: "stopped"}
"""What an exit code of the driver means."""


class RunFailedError(RuntimeError):
    """A run or a search has failed; the message is its first cause."""


_connections: list[Connection] = []


def connect(
    address: str, *, working_dir: str | Path | None = ".", runtime_env: Mapping[str, Any] | None = None
) -> Connection:
    """Connect this process to a cluster, for :func:`train`, :func:`tune` and :func:`attach`.

    Connecting again replaces the connection before.

    Args:
        address: ``ray://HOST:10001`` (Ray Client), or ``local`` for a private cluster on this machine.
        working_dir: Folder sent to the cluster beside this package, with tasks and small data in it, without
            virtual environments, caches, run directories and what ``.gitignore`` and ``.rayignore`` name;
            ``None`` sends this package alone.
        runtime_env: More of Ray's runtime environment, e.g. ``{"pip": ["timm"]}``.

    Returns:
        The connection; ``close()`` ends it, runs on the cluster go on.

    Raises:
        ConfigError: there is no cluster to be connected to; says why.
    """
    disconnect()
    _connections.append(Connection(address, working_dir, runtime_env))
    atexit.register(disconnect)  # while Ray can still be shut down; twice does no harm
    return _connections[-1]


def disconnect() -> None:
    """End the connection, if there is one; runs on the cluster go on."""
    while _connections:
        _connections.pop().close()


def train(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    set: Mapping[str, Any] | None = None,  # noqa: A002  # as on the command line
    out: str | Path | None = None,
    resume: bool | str = False,
    wait: bool = True,
) -> RemoteRun:
    """Train on the connected cluster, as ``ray-dynbs train`` does; shows every epoch.

    The run belongs to the cluster: an interrupt, or a lost connection, ends only the watching.

    Args:
        config: A YAML file, or its keys.
        set: Keys to override, e.g. ``{"policy.grad_norm_low": 0.5}``.
        out: Folder or URI on the cluster for run directories, instead of the configuration's.
        resume: Go on with the newest run of this name, or with the directory given.
        wait: Return when it has ended; else at once.

    Raises:
        ConfigError: the input is wrong, or a run of this name is in progress.
        RunFailedError: the run failed.
        KeyboardInterrupt: watching was interrupted; :func:`attach` goes on with it.
    """
    _see_connected()
    data, where = _keys(config, set)
    if out is not None:
        data["out"] = str(out)
    loaded = make_config(data, where)
    start_driver(loaded.name, RUN_KIND, dump_yaml(loaded), resume)
    run = RemoteRun(loaded.name, loaded)
    return run.wait() if wait else run


def tune(
    search: str | Path | Mapping[str, Any],
    *,
    set: Mapping[str, Any] | None = None,  # noqa: A002  # as on the command line
    out: str | Path | None = None,
    resume: bool | str = False,
    wait: bool = True,
) -> RemoteSearch:
    """Search on the connected cluster, as ``ray-dynbs tune`` does; shows every trial that ends.

    Args:
        search: A YAML file, or its keys (a ``base`` that is a file is looked up here).
        set: Keys of the search to override.
        out: Folder or URI on the cluster for the search's directory, instead of the search's.
        resume: Go on with the newest search of this name, or with the directory given.
        wait: Return when it has ended; else at once.

    Raises:
        ConfigError: the input is wrong, or a run of this name is in progress.
        RunFailedError: nothing came of any trial.
        KeyboardInterrupt: watching was interrupted; :func:`attach` goes on with it.
    """
    _see_connected()
    data, where = _keys(search, set)
    if out is not None:
        data["out"] = str(out)
    folder = Path(where).parent if isinstance(search, str | Path) else Path()
    candidates = Candidates(parse_search(data, where), folder)
    whole = candidates.recorded()  # the base is written out: its file is not on the cluster
    content = yaml.safe_dump(whole, sort_keys=False, allow_unicode=True)
    start_driver(candidates.search.name, SEARCH_KIND, content, resume)
    found = RemoteSearch(candidates.search.name, candidates)
    return found.wait() if wait else found


def attach(name: str, *, out: str = "runs", wait: bool = True) -> RemoteRun | RemoteSearch:
    """Watch a run or a search that was started before, by its name.

    Args:
        name: The configuration's ``name``.
        out: Where to look for one that has ended: its folder or URI on the cluster.
        wait: Return when it has ended; else at once.

    Raises:
        ConfigError: there is none.
        RunFailedError: it failed.
        KeyboardInterrupt: watching was interrupted.
    """
    _see_connected()
    content, uri = find_record(name, out)
    data = yaml.safe_load(content)
    found: RemoteRun | RemoteSearch
    if "space" in data:
        found = RemoteSearch(name, Candidates(parse_search(data, name), Path()), uri)
    else:
        found = RemoteRun(name, make_config(data, name), uri)
    return found.wait() if wait else found


def _see_connected() -> None:
    if not ray.is_initialized():
        raise ConfigError('not connected; allowed: ray_dynbs.connect("ray://HOST:10001") or connect("local")')


def _keys(
    given: str | Path | Mapping[str, Any] | Config, changes: Mapping[str, Any] | None
) -> tuple[Any, str]:
    """The keys of a file or a mapping, changed, and what to call them in a complaint.

    Raises:
        ConfigError: it is neither, or holds what YAML cannot.
    """
    if isinstance(given, str | Path):
        data, where = read_yaml(Path(given)), str(given)
        data.setdefault("name", name_of_file(given))
    elif isinstance(given, Mapping | Config):
        whole = given.model_dump() if isinstance(given, Config) else given
        data, where = _plain(dict(whole), "config"), "config"
    else:
        raise ConfigError(f"config is {type(given).__name__}; allowed: a file, its keys, or a Config")
    for key, value in (changes or {}).items():
        if not isinstance(key, str):
            raise ConfigError(f"set: a key is {key!r}; allowed: words such as 'optimizer.lr'")
        set_key(data, key, _plain(value, f"set: {key}"), f"set: {key}")
    return data, where


def _plain(value: Any, where: str) -> Any:
    """A copy of a value as YAML has them: numbers of NumPy, tuples and paths become plain ones.

    Raises:
        ConfigError: it cannot be one.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, where) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"{where} is {type(value).__name__}; allowed: numbers, words, lists and mappings")


class _Remote(Record):
    """Something in progress on the cluster, or ended there."""

    def __init__(self, name: str, uri: str | None) -> None:
        self.name, self._uri = name, uri
        self._watch = Watch(find_driver(name))
        self._said: list[str] = []
        self._unseen: list[Mapping[str, Any]] = []

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``stopped``, ``failed``; ``ended`` where nobody knows how any more."""
        self._take(self._watch.poll())
        if self._watch.code is not None:
            return STATUS.get(self._watch.code, "failed")
        if self._watch.alive:
            return "running"
        return "finished" if self._uri is not None and self._is_complete() else "ended"

    @property
    def uri(self) -> str:
        """Its directory, on the cluster or in a bucket.

        Raises:
            ConfigError: it has not got as far as to make one.
        """
        if self._uri is None:
            self._take(self._watch.poll())
        if self._uri is None:
            raise ConfigError(f"{self.name}: has no directory yet; allowed: wait(), or a little patience")
        return self._uri

    def stop(self) -> None:
        """End it as by Ctrl-C; what is saved can be resumed."""
        self._watch.stop()

    def wait(self) -> Self:
        """Show what happens until it ends.

        Raises:
            ConfigError: its input was wrong.
            RunFailedError: it failed.
            KeyboardInterrupt: watching was interrupted; it goes on.
        """
        try:
            with self._view() as view:
                if not self._watch.alive:
                    self._show_record(view)
                for event in self._unseen:  # taken in while nobody looked
                    self._show(event, view)
                self._unseen.clear()
                while self._watch.alive and self._watch.code is None:
                    self._take(self._watch.poll(), view)
        except KeyboardInterrupt:
            print(
                f"{self.name} goes on on the cluster: ray_dynbs.attach({self.name!r}) watches it again, "
                f"ray_dynbs.attach({self.name!r}, wait=False).stop() ends it"
            )
            raise
        if self._watch.was_lost and self.status != "finished":
            raise RunFailedError(f"{self.name}: its driver is gone; train(..., resume=True) goes on with it")
        self._watch.dismiss()
        self._raise_failure()
        return self

    @abstractmethod
    def _view(self) -> Any:
        """What shows it while it goes on."""

    @abstractmethod
    def _show(self, event: Mapping[str, Any], view: Any) -> None:
        """Show one event."""

    @abstractmethod
    def _is_complete(self) -> bool:
        """Whether the record is that of something that came to its end."""

    @abstractmethod
    def _show_record(self, view: Any) -> None:
        """Show what is on record of something that nobody remembers."""

    def _take(self, lines: list[str], view: Any = None) -> None:
        """Sort what the driver has said: events to the view, words to the reader."""
        for line in lines:
            event = read_event(line)
            if event is None:
                if line.strip() and not line.startswith(MARK):
                    self._said.append(line)
                    if view is not None:
                        print(line)
            elif event["kind"] == RUN:
                self._uri = event["uri"]
            elif view is not None:
                self._show(event, view)
            else:
                self._unseen.append(event)

    def _raise_failure(self) -> None:
        code = self._watch.code
        if code in (0, 130, None):
            return
        errors = [line for line in self._said if line.startswith("error")]
        cause = errors[0].partition(": ")[2] if errors else f"the driver ended with exit code {code}"
        if code == 2:
            raise ConfigError(cause)
        raise RunFailedError(cause)


class RemoteRun(_Remote, RunRecord):
    """A run on the cluster, in progress or ended."""

    def __init__(self, name: str, config: Config, uri: str | None = None) -> None:
        super().__init__(name, uri)
        self._config = config

    def __repr__(self) -> str:
        return f"<run {self.name}: {self.status}; {self._uri or 'no directory yet'}>"

    def _view(self) -> Any:
        return make_view(self._config.metric.name, self._config.epochs, print)

    def _show(self, event: Mapping[str, Any], view: Any) -> None:
        if event["kind"] == EPOCH:
            decision = event["decision"] and Decision.from_record(event["decision"])
            view.show(event["row"], tuple(event["notes"]), decision)

    def _is_complete(self) -> bool:
        return max(self.epochs["epoch"].to_pylist(), default=-1) + 1 >= self._config.epochs

    def _show_record(self, view: Any) -> None:
        made = {(d.incarnation, d.epoch): d for d in self.decisions if d.signal is not None}
        for row in self.epochs.to_pylist():
            view.show(row, (), made.get((row["incarnation"], row["epoch"])))


class RemoteSearch(_Remote, SearchRecord):
    """A search on the cluster, in progress or ended."""

    def __init__(self, name: str, candidates: Candidates, uri: str | None = None) -> None:
        super().__init__(name, uri)
        self._candidates = candidates

    def __repr__(self) -> str:
        return f"<search {self.name}: {self.status}; {self._uri or 'no directory yet'}>"

    def _view(self) -> Any:
        metric, target = self._candidates.base.metric, self._candidates.search.target
        return make_trial_view(metric.name, metric.mode, target.cost if target else None, print)

    def _show(self, event: Mapping[str, Any], view: Any) -> None:
        if event["kind"] == TRIAL:
            view.show(event["row"])

    def _is_complete(self) -> bool:
        return self.best is not None

    def _show_record(self, view: Any) -> None:
        for row in self.trials.to_pylist():
            view.show(row)
