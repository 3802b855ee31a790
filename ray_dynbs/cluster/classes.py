"""How often each class occurs in the training rows, for guards that go by it."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import ray
from pydantic import ValidationError

from ray_dynbs.cluster.data import Blocks
from ray_dynbs.config.errors import explain
from ray_dynbs.config.schema import Batching, Config
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.guards.class_coverage import AUTO

MOST_CLASSES = 10_000
Settings = TypeVar("Settings", bound=Batching)


def with_class_counts(settings: Settings, blocks: Blocks | None) -> Settings:
    """The same settings with every ``class_counts: auto`` replaced by what the training rows hold.

    Args:
        settings: Of a run.
        blocks: Its training rows; ``None`` where the loop brings them.

    Raises:
        ConfigError: no rows to count in, no such column, a column that holds no classes, or a floor above
            ``batch.max``.
    """
    guards = [dict(guard) for guard in settings.guards]
    wanting = [g for g in guards if g["name"] == "class_coverage" and g.get("class_counts", AUTO) == AUTO]
    if not wanting:
        return settings
    for guard in wanting:
        if blocks is None:
            raise ConfigError(
                "class_coverage: class_counts is auto, and the loop brings its own data; allowed: numbers, "
                "or datasets={'train': ...}"
            )
        default = settings.data.label if isinstance(settings, Config) else None
        guard["class_counts"] = count_classes(blocks, guard.get("label") or default or "label")
    try:
        return type(settings).model_validate({**settings.model_dump(), "guards": guards})
    except ValidationError as error:
        raise ConfigError(explain(error, model=type(settings))) from error


def count_classes(blocks: Blocks, column: str) -> list[float]:
    """Rows of each class, most frequent first.

    Raises:
        ConfigError: there is no such column, or it holds no class labels.
    """
    count: Any = _count
    total: Counter[Any] = Counter()
    for found in ray.get([count.remote(ref, column) for ref in blocks.refs]):
        if isinstance(found, str):
            raise ConfigError(f"class_coverage: class_counts is auto, and {found}; allowed: numbers")
        total.update(found)
    return [float(number) for _, number in total.most_common()]


@ray.remote(num_cpus=0)
def _count(table: pa.Table, column: str) -> dict[Any, int] | str:
    """Value -> rows, or why there is none."""
    if column not in table.column_names:
        return f"label column {column!r} is not among {', '.join(table.column_names)}"
    values = table[column]
    kinds = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_floating)
    if not any(holds(values.type) for holds in kinds):
        return f"label column {column!r} is of type {values.type}, not of classes"
    counted = pc.value_counts(values)
    if len(counted) > MOST_CLASSES:
        return f"label column {column!r} has more than {MOST_CLASSES:,} different values"
    return {each["values"]: each["counts"] for each in counted.to_pylist()}
