"""Rows by number out of Arrow tables, as fresh tensors.

The tables may be memory the whole node shares (Ray maps its objects read-only, but a tensor made
from such a mapping is writable and corrupts it silently), so nothing here ever hands out a view:
every batch is a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from ray_dynbs.core.errors import ConfigError

TensorBatch = dict[str, torch.Tensor]


MOST_LOOKED_AT, MOST_BYTES_LOOKED_AT, BYTES_AT_ONCE = 10_000, 2**29, 2**25
"""Rows among which the largest one is looked for, and how much is read for that, in all and in one go."""
_WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


class ColumnStore:
    """Random access to the rows of a list of tables.

    Args:
        tables: Blocks in row order; empty ones are allowed.
        columns: The columns to read; all of them if ``None``.
        float_dtype: What floating columns become; their own type if ``None``.

    Raises:
        ConfigError: a column that is missing, holds nulls, or cannot become a tensor.
    """

    def __init__(
        self,
        tables: Sequence[pa.Table],
        columns: Sequence[str] | None = None,
        float_dtype: torch.dtype | None = None,
    ) -> None:
        filled = [table for table in tables if table.num_rows]
        names = list(columns) if columns is not None else (filled[0].column_names if filled else [])
        self._starts = np.cumsum([0] + [table.num_rows for table in filled])
        self._float_dtype = float_dtype
        self._blocks = {name: [_to_tensor(table, name) for table in filled] for name in names}
        for name, blocks in self._blocks.items():
            shapes = sorted({tuple(block.shape[1:]) for block in blocks})
            types = sorted({str(block.dtype) for block in blocks})
            if len(shapes) > 1:
                raise ConfigError(f"column {name!r} has rows of shapes {shapes}; allowed: one shape")
            if len(types) > 1:
                raise ConfigError(
                    f"column {name!r} has blocks of types {', '.join(types)}; allowed: one type"
                )

    @property
    def num_rows(self) -> int:
        """Rows over all blocks."""
        return int(self._starts[-1])

    def gather(self, rows: npt.NDArray[np.int64]) -> TensorBatch:
        """The rows with these numbers, in this order.

        Args:
            rows: int64 [k], each in ``[0, num_rows)``.

        Returns:
            Column name -> tensor [k, ...]; memory of its own.
        """
        if len(self._starts) == 2:
            index = torch.from_numpy(rows)
            batch = {name: blocks[0].index_select(0, index) for name, blocks in self._blocks.items()}
        else:
            batch = self._gather_blocks(rows)
        if self._float_dtype is not None:
            batch = {k: v.to(self._float_dtype) if v.is_floating_point() else v for k, v in batch.items()}
        return batch

    def largest_row(self) -> int:
        """The row with the fewest zeros among some from all over: all have one size, but padding is zeros."""
        row_bytes = max(sum(block.nbytes for blocks in self._blocks.values() for block in blocks), 1)
        row_bytes = max(row_bytes // self.num_rows, 1)
        count = max(min(self.num_rows, MOST_LOOKED_AT, MOST_BYTES_LOOKED_AT // row_bytes), 1)
        looked_at = np.linspace(0, self.num_rows - 1, count).astype(np.int64)
        largest, most = 0, -1
        for some in np.array_split(looked_at, min(-(-count * row_bytes // BYTES_AT_ONCE), count)):
            batch = self.gather(some)
            filled = torch.stack([(v.reshape(len(some), -1) != 0).sum(dim=1) for v in batch.values()]).sum(0)
            if int(filled.max()) > most:
                largest, most = int(some[int(filled.argmax())]), int(filled.max())
        return largest

    def _gather_blocks(self, rows: npt.NDArray[np.int64]) -> TensorBatch:
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        batch = {
            name: torch.empty((len(rows), *blocks[0].shape[1:]), dtype=blocks[0].dtype)
            for name, blocks in self._blocks.items()
        }
        for block in np.unique(owner):
            places = torch.from_numpy(np.flatnonzero(owner == block))
            index = torch.from_numpy(rows[owner == block] - self._starts[block])
            for name, blocks in self._blocks.items():
                batch[name][places] = blocks[block].index_select(0, index)
        return batch


def _to_tensor(table: pa.Table, name: str) -> torch.Tensor:
    """One column as a tensor [rows, ...], without copying where its layout allows."""
    if name not in table.column_names:
        raise ConfigError(f"column {name!r} is missing; the data has {table.column_names}")
    column = table[name]
    array = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    values = _to_numpy(array, name)
    if values.dtype.kind not in "fiub":
        raise ConfigError(f"column {name!r} is {array.type}; allowed: numbers or lists of numbers")
    if values.dtype in _WIDER:  # torch stores these, but cannot pick rows out of them
        if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
            raise ConfigError(f"column {name!r} holds numbers above 2**63 - 1; allowed: what int64 holds")
        values = values.astype(_WIDER[values.dtype])
    with warnings.catch_warnings():
        # The mapping is read-only and stays so: it is only ever copied from (index_select).
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(values)


def _to_numpy(array: pa.Array, name: str) -> npt.NDArray[np.generic]:
    if array.null_count:
        raise ConfigError(f"column {name!r} holds {array.null_count} nulls; allowed: none")
    if isinstance(array, pa.ExtensionArray):
        to_numpy = getattr(array, "to_numpy_ndarray", None)  # arrow's fixed-shape tensor type
        if to_numpy is not None:
            return np.asarray(to_numpy())
        return np.asarray(array.to_numpy(zero_copy_only=False))  # Ray's tensor types
    if pa.types.is_fixed_size_list(array.type):
        flat = _to_numpy(array.flatten(), name)
        return flat.reshape(len(array), array.type.list_size, *flat.shape[1:])
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        lengths = array.value_lengths().unique().to_pylist()
        if len(lengths) != 1:
            raise ConfigError(
                f"column {name!r} has lists of lengths {sorted(lengths)[:5]}; allowed: one length"
            )
        flat = _to_numpy(array.flatten(), name)
        return flat.reshape(len(array), lengths[0], *flat.shape[1:])
    return np.asarray(array.to_numpy(zero_copy_only=False))
