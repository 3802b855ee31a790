"""Validation errors as one line: which key, what was found, what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

_UNION_MEMBERS = ("str", "bool", "list[str]", "constrained-int", "list[constrained-int]", "dict[str,int]")
_CADENCE = "epoch, {steps: N} or {samples: N}"
_BY_EXAMPLE = {
    "policy": "a mapping such as {name: noise_scale} (as --set: policy.name=noise_scale)",
    "batch.decide_every": _CADENCE,
    "checkpoint.every": _CADENCE,
    "evaluate.every": _CADENCE,
}


def nearest(word: str, names: Iterable[str]) -> str:
    """``(did you mean 'x'?)`` where a name is close, else nothing."""
    close = difflib.get_close_matches(word, list(names), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def explain(error: ValidationError, *, where: str = "", names: Iterable[str] = (), model: Any = None) -> str:
    """The first problem of a validation in one line, and how many more there are.

    Args:
        error: What pydantic found.
        where: Path in front of each key.
        names: Keys allowed at the top of what was validated.
        model: The pydantic model validated, to find the keys allowed deeper down.
    """
    problems = error.errors(include_url=False)
    # A misspelt key usually also makes the right one missing: the misspelling is the cause.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = _path(problem)
    key = ".".join(str(part) for part in ([where] if where else []) + path)
    alternatives = [p for p in problems if _path(p) == path]  # one for each member of a union
    text = _phrase(alternatives, key, _allowed(model, path[:-1]) if model is not None else list(names))
    more = len({tuple(_path(p)) for p in problems}) - 1
    return f"{text} (and {more} more)" if more > 0 else text


def _path(problem: Any) -> list[Any]:
    """The keys that lead to a problem, without pydantic's names for the members of a union."""
    return [p for p in problem["loc"] if p not in _UNION_MEMBERS and "literal" not in str(p)]


def _phrase(alternatives: list[Any], key: str, names: list[str]) -> str:
    problem = alternatives[0]
    kind, context = problem["type"], problem.get("ctx", {})
    if key in _BY_EXAMPLE and "dict_type" in {p["type"] for p in alternatives}:
        return f"{key} is {problem['input']!r}; allowed: {_BY_EXAMPLE[key]}"
    if key.startswith("guards.") and kind == "dict_type":
        return f"{key} is {problem['input']!r}; allowed: a mapping such as {{name: cooldown, decisions: 1}}"
    if kind == "extra_forbidden":
        word = key.rpartition(".")[2]
        return f"{key}: unknown key{nearest(word, names)}; allowed: {', '.join(names)}"
    if kind == "missing":
        return f"{key} is missing"
    if kind == "value_error":
        message = str(context.get("error", problem["msg"]))
        return f"{key}: {message}" if key else message
    found = problem["input"]
    shown = f"{found!r}" if len(repr(found)) < 80 else type(found).__name__
    if kind == "literal_error" and isinstance(found, str):
        shown += nearest(found, re.findall(r"'([^']*)'", str(context["expected"])))
    allowed = " or ".join(_requirement(p["type"], p.get("ctx", {}), p["msg"]) for p in alternatives)
    return f"{key} is {shown}; allowed: {allowed}"


def _requirement(kind: str, context: dict[str, Any], message: str) -> str:
    words = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "string_type": "text",
        "bool_type": "true or false",
        "dict_type": "a mapping",
        "model_type": "a mapping",
        "model_attributes_type": "a mapping",
        "list_type": "a list",
        "finite_number": "a finite number",
    }
    if kind in words:
        return words[kind]
    if kind == "literal_error":
        return str(context["expected"])
    for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
        if name in context:
            return f"{sign} {context[name]:g}"
    return message.removeprefix("Input should be ").removeprefix("String should ")


def _allowed(model: Any, path: list[Any]) -> list[str]:
    """The keys of the section at a path of a nested model."""
    for part in path:
        field = model.model_fields.get(part)
        if field is None or not hasattr(field.annotation, "model_fields"):
            return []
        model = field.annotation
    return [field.alias or name for name, field in model.model_fields.items()]
