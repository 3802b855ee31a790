"""The figures of a benchmark as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(results: list[dict[str, Any]], title: str | None = None) -> None:
    """Print cases, each with ours, the baseline's and their ratio."""
    table = Table("case", "unit", "ours", "baseline", "ratio", "baseline is", title=title)
    for row in results:
        ours, baseline = row["ours"], row["baseline"]
        cells = f"{ours:,.4g}", f"{baseline:,.4g}", f"{ours / baseline:.3g}"
        table.add_row(row["case"], row["unit"], *cells, row["baseline_name"])
    Console(width=140).print(table)
