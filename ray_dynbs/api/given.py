"""What a caller gives as a configuration, a file, its keys or a :class:`Config`, as keys that YAML has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ray_dynbs.config import Config
from ray_dynbs.config.load import name_of_file, read_yaml, set_key
from ray_dynbs.core.errors import ConfigError


def keys_of(
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
