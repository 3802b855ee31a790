"""What Ray Data hands over is looked at before a run begins."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data

from ray_dynbs.cluster.classes import with_class_counts
from ray_dynbs.cluster.data import fetch, prepare_data
from ray_dynbs.config.schema import LoopSettings
from ray_dynbs.core.coverage import smallest_covering_batch
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.signal import Signal
from ray_dynbs.training.columns import ColumnStore
from tests.support import split_table, table

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]


def test_rows_keep_their_order_through_a_pipeline() -> None:
    """Many blocks of uneven size and a lazy map: the rows are numbered as they were stored."""
    parts = [part for part in split_table(table(500), [1, 20, 21, 300]) if part.num_rows]
    lazy = ray.data.from_arrow(parts).map_batches(lambda batch: batch, batch_size=7)
    data = prepare_data({"train": lazy}, ["row", "x"])
    assert data.num_rows == {"train": 500}
    store = ColumnStore(fetch(data.blocks["train"]))
    assert store.gather(pa.array(range(500)).to_numpy().copy())["row"].tolist() == list(range(500))


def test_nulls_and_missing_columns_and_emptiness_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [[1.0], None], "y": [1, 2]}), tmp_path / "holes.parquet")
    with pytest.raises(ConfigError, match="train data: column 'x' holds 1 nulls"):
        prepare_data({"train": str(tmp_path / "holes.parquet")}, None)
    with pytest.raises(ConfigError, match="train data: no column 'z'; it has row, x, y"):
        prepare_data({"train": ray.data.from_arrow(table(3))}, ["z"])
    with pytest.raises(ConfigError, match="train data: no rows"):
        prepare_data({"train": ray.data.from_arrow(table(3)).limit(0)}, None)
    with pytest.raises(ConfigError, match="train data is int; allowed: paths, a table, a Ray data set"):
        prepare_data({"train": 3}, None)


def test_other_rows_than_were_counted_are_said(tmp_path: Path) -> None:
    pq.write_table(table(4), tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="its files hold 9 rows, but Ray Data reads 4"):
        prepare_data({"train": path}, None, {"train": 9})
    assert prepare_data({"train": path}, None, {"train": 4}).num_rows == {"train": 4}


def test_class_counts_are_taken_from_the_training_rows(tmp_path: Path) -> None:
    """Over several blocks; the floor is then known, and checked against the ceiling."""
    labels = [7] * 90 + [3] * 9 + [5]
    parts = [pa.table({"x": list(range(100)), "kind": labels}).slice(at, 25) for at in (0, 25, 50, 75)]
    blocks = prepare_data({"train": ray.data.from_arrow(parts)}, None).blocks["train"]
    guard = {"name": "class_coverage", "label": "kind", "quantile": 0.5}
    settings = LoopSettings.model_validate({"guards": [guard], "batch": {"initial": 96, "max": 512}})
    counted = with_class_counts(settings, blocks)
    assert counted.guards[0]["class_counts"] == [90.0, 9.0, 1.0]
    assert with_class_counts(counted, None) is counted
    manager = counted.make_manager()
    signal = Signal.measured(num_steps=1, num_finite_steps=1, grad_norm=99.0)
    assert manager.decide(signal).plan.global_batch_size == smallest_covering_batch([90, 9, 1], 0.5) > 48
    with pytest.raises(ConfigError, match=r"class_coverage needs 299 rows, batch\.max is 128"):
        with_class_counts(
            LoopSettings.model_validate(
                {"guards": [{**guard, "quantile": 0.95}], "batch": {"max": 128, "initial": 32}}
            ),
            blocks,
        )
    for wrong, words in [
        ({"label": "y"}, "label column 'y' is not among x, kind"),
        ({}, "label column 'label' is not among x, kind"),
    ]:
        unknown = LoopSettings.model_validate({"guards": [{"name": "class_coverage", **wrong}]})
        with pytest.raises(ConfigError, match=words):
            with_class_counts(unknown, blocks)
    with pytest.raises(ConfigError, match="the loop brings its own data; allowed: numbers, or datasets="):
        with_class_counts(settings, None)
    with pytest.raises(ConfigError, match="class_counts is auto, which needs the training rows"):
        settings.make_manager().decide(signal)
