"""What Ray Data hands over is looked at before a run begins."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data

from ray_dynbs.cluster.data import fetch, prepare_data
from ray_dynbs.core.errors import ConfigError
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
