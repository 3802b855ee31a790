"""The page of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def render_search(
    name: str, rows: Sequence[Mapping[str, Any]], *, best: str, metric: Any, target: Any
) -> str:
    return "<html></html>"
