"""Runs and searches on a connected cluster, started from a notebook or a script.

The driver of a run lives on the cluster (``cluster/remote.py``); ``api/following.py`` watches it.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import yaml

from ray_dynbs.api.following import RemoteRun, RemoteSearch
from ray_dynbs.api.given import keys_of
from ray_dynbs.cluster.connection import Connection
from ray_dynbs.cluster.remote import RUN_KIND, SEARCH_KIND, find_record, start_driver
from ray_dynbs.config import Config
from ray_dynbs.config.load import dump_yaml, make_config
from ray_dynbs.config.search import Candidates, parse_search
from ray_dynbs.core.errors import ConfigError

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
    data, where = keys_of(config, set)
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
    data, where = keys_of(search, set)
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
