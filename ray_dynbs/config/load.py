"""From a YAML file and ``--set`` overrides to a :class:`Config`."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ray_dynbs.config.errors import explain
from ray_dynbs.config.schema import Batching, Config
from ray_dynbs.config.sections import default_guards
from ray_dynbs.core.errors import ConfigError

LARGEST = 2**63 - 1


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool):
                raise ConfigError(f"line {key_node.start_mark.line + 1}: a key is {key!r}; allowed: words")
            if str(key) in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {key!r} is given twice")
            seen.add(str(key))
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, override and validate a configuration.

    Args:
        path: The YAML file. Its stem is the run's name where it has none.
        overrides: ``section.key=value`` with YAML values; list items by number.

    Raises:
        ConfigError: the file does not exist or is no YAML mapping, or a key is unknown, missing, of
            the wrong type or out of range; one line that begins with the file.
    """
    path = Path(path)
    data = read_yaml(path)
    data.setdefault("name", name_of_file(path))
    for override in overrides:
        apply_override(data, override)
    return make_config(data, name_with(path, overrides))


def name_with(path: str | Path, overrides: Sequence[str]) -> str:
    """What to call a file in a complaint, where a value may be an override's."""
    return (
        f"{path} with {' '.join(f'--set {override}' for override in overrides)}" if overrides else str(path)
    )


def name_of_file(path: str | Path) -> str:
    """The name of a run, or a search, whose file gives it none."""
    return re.sub(r"[^\w.-]", "-", Path(path).stem)


def make_config(data: dict[str, Any], where: str) -> Config:
    """Validate a configuration.

    Args:
        data: Its keys.
        where: What to call it in a complaint.

    Raises:
        ConfigError: a key is unknown, missing, of the wrong type or out of range; one line.
    """
    _refuse_huge(data, where)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, model=Config)}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping.

    Raises:
        ConfigError: it does not exist, or holds something else.
    """
    try:
        data = parse_yaml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: {reason}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds {type(data).__name__}; allowed: a mapping of keys")
    return data


def parse_yaml(text: str) -> Any:
    """Safe YAML.

    Raises:
        ConfigError: it does not parse; says where, in one line.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"not YAML: {place}{error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: an impossible date, too many digits
        raise ConfigError(f"not YAML: {' '.join(str(error).split())[:200]}") from error


def _refuse_huge(data: Any, where: str) -> None:
    """Refuse whole numbers that are none to any machine.

    Raises:
        ConfigError: there is one; names its key.
    """
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ConfigError(f"{where}: {key} is {str(value)[:20]}...; allowed: at most {LARGEST}")
        _refuse_huge(value, where)


def dump_yaml(config: Batching, **more: str) -> str:
    """The resolved configuration, with keys in front of it if given; a :class:`Config` loads again."""
    return yaml.safe_dump({**more, **config.model_dump()}, sort_keys=False, allow_unicode=True)


def apply_override(data: dict[str, Any], override: str) -> None:
    """Apply one ``section.key=value`` in place; see :func:`set_key`.

    Raises:
        ConfigError: not of that form, or a path through something that is no section.
    """
    path, equals, value = override.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set {override!r}: allowed: section.key=value")
    try:
        parsed = parse_yaml(value)
    except ConfigError as error:
        raise ConfigError(f"--set {override}: {error}") from error
    set_key(data, path.strip(), parsed, f"--set {override}")


def set_key(data: dict[str, Any], path: str, value: Any, where: str) -> None:
    """Set one key of a configuration in place.

    Choosing another ``name`` for the policy, a guard, the optimizer or the scheduler starts that section
    anew, since the old one's keys belong to the old name; an optimizer keeps its ``lr``.

    Args:
        data: The configuration.
        path: ``section.key``; list items by number.
        value: Its value.
        where: What asks for it, for a complaint.

    Raises:
        ConfigError: a path through something that is no section.
    """
    parts = path.split(".")
    if parts[0] == "guards" and len(parts) > 1:
        data.setdefault("guards", default_guards())
    node: Any = data
    for part in parts[:-1]:
        node = _descend(node, part, where)
    last = parts[-1]
    if isinstance(node, list):
        node[_index(node, last, where)] = value
        return
    if not isinstance(node, dict):
        raise ConfigError(f"{where}: {parts[-2]} is {node!r}, which has no keys")
    if last == "name" and parts[0] in _NAMED_SECTIONS and len(parts) > 1 and node.get("name") != value:
        kept = {"lr": node["lr"]} if "lr" in node and parts[0] == "optimizer" else {}
        node.clear()
        node.update(kept)
    node[last] = value


_NAMED_SECTIONS = ("policy", "guards", "optimizer", "scheduler")


def _descend(node: Any, part: str, where: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, where)]
    if not isinstance(node, dict):
        raise ConfigError(f"{where}: {node!r} has no key {part!r}")
    if node.get(part) is None:
        node[part] = {}
    if not isinstance(node[part], dict | list):
        raise ConfigError(f"{where}: {part} is {node[part]!r}, which has no keys")
    return node[part]


def _index(node: list[Any], part: str, where: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"{where}: {part!r} is no item of a list of {len(node)}")
    return int(part)


def changed_keys(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """The keys in which two resolved configurations differ, with both values; not where they write to."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in {**old, **new}:
            if path or key != "out":
                found += changed_keys(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
        return found
    return [] if old == new else [(path, old, new)]
