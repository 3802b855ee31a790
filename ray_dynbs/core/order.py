"""The order in which a pass visits the rows: a pure function of seed, epoch and row count.

It knows nothing of block layout, batch size or number of workers, so none of them can change it,
and a resumed run needs nothing but ``(seed, epoch, rows already used)`` to go on exactly.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ray_dynbs.core.errors import ConfigError

Shuffle = Literal["none", "window", "full"]
WINDOW_ROWS = 65_536


def epoch_order(
    num_rows: int, *, seed: int, epoch: int, shuffle: Shuffle, window_rows: int = WINDOW_ROWS
) -> npt.NDArray[np.int64]:
    """Row numbers in visiting order: each of ``0 .. num_rows - 1`` exactly once.

    Args:
        num_rows: Rows of the data set, at least 0.
        seed: The run's seed, at least 0.
        epoch: The pass, from 0; passes differ in order (unless ``shuffle`` is ``none``).
        shuffle: ``none`` keeps the stored order; ``full`` is one permutation of everything;
            ``window`` permutes windows of ``window_rows`` neighbouring rows and the rows inside
            each, which keeps reads local (up to ``window_rows`` rows it equals ``full``).
        window_rows: Rows in a window, at least 1.

    Returns:
        int64 [num_rows].

    Raises:
        ConfigError: an unknown ``shuffle`` or a negative number.
    """
    if num_rows < 0 or seed < 0 or epoch < 0 or window_rows < 1:
        raise ConfigError(
            f"num_rows={num_rows}, seed={seed}, epoch={epoch}: allowed: 0 or more; "
            f"window_rows={window_rows}: allowed: 1 or more"
        )
    if shuffle not in get_args(Shuffle):
        raise ConfigError(f"shuffle is {shuffle!r}; allowed: {', '.join(get_args(Shuffle))}")
    if shuffle == "none":
        return np.arange(num_rows, dtype=np.int64)
    rng = np.random.default_rng([seed, epoch])
    if shuffle == "full" or num_rows <= window_rows:
        return rng.permutation(num_rows).astype(np.int64, copy=False)
    starts = rng.permutation(np.arange(0, num_rows, window_rows))
    windows = (np.arange(start, min(start + window_rows, num_rows), dtype=np.int64) for start in starts)
    return np.concatenate([rng.permutation(window) for window in windows])
