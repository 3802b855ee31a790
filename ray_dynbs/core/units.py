"""Quantities in words."""

from __future__ import annotations


def gib(num_bytes: float) -> str:
    """Bytes as GiB.

    >>> gib(2.57 * 2**30), gib(1440 * 2**30)
    ('2.57 GiB', '1,440 GiB')
    """
    number = num_bytes / 2**30
    return f"{number:,.0f} GiB" if number >= 1000 else f"{number:.3g} GiB"
