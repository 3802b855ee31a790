"""Where tables are printed."""

from __future__ import annotations

import sys

from rich.console import Console

WIDE = 250


def wide_console() -> Console:
    """The terminal as wide as it is; a pipe, which has no width of its own, wide enough for every line."""
    return Console() if sys.stdout.isatty() else Console(width=WIDE)
