"""The visiting order is a permutation, and a function of nothing but seed, epoch and row count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.order import epoch_order

shuffles = st.sampled_from(["none", "window", "full"])


@given(
    num_rows=st.integers(0, 3_000),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
    shuffle=shuffles,
    window_rows=st.integers(1, 500),
)
def test_every_row_once_and_reproducible(
    num_rows: int, seed: int, epoch: int, shuffle: str, window_rows: int
) -> None:
    arguments = {"seed": seed, "epoch": epoch, "shuffle": shuffle, "window_rows": window_rows}
    order = epoch_order(num_rows, **arguments)
    assert np.array_equal(np.sort(order), np.arange(num_rows))
    assert np.array_equal(order, epoch_order(num_rows, **arguments))


@pytest.mark.parametrize("shuffle", ["window", "full"])
def test_epochs_and_seeds_differ(shuffle: str) -> None:
    orders = {
        tuple(epoch_order(100, seed=seed, epoch=epoch, shuffle=shuffle))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_none_keeps_the_stored_order() -> None:
    assert list(epoch_order(5, seed=3, epoch=2, shuffle="none")) == [0, 1, 2, 3, 4]


def test_window_keeps_neighbours_together() -> None:
    order = epoch_order(1_000, seed=0, epoch=0, shuffle="window", window_rows=100)
    windows = [set(order[i : i + 100] // 100) for i in range(0, 1_000, 100)]
    assert all(len(window) == 1 for window in windows)
    assert [w.pop() for w in windows] != list(range(10))


def test_up_to_one_window_equals_full() -> None:
    arguments = {"seed": 4, "epoch": 1}
    window = epoch_order(100, shuffle="window", window_rows=100, **arguments)
    assert np.array_equal(window, epoch_order(100, shuffle="full", **arguments))


def test_unknown_shuffle_is_refused() -> None:
    with pytest.raises(ConfigError, match="allowed: none, window, full"):
        epoch_order(3, seed=0, epoch=0, shuffle="random")  # type: ignore[arg-type]
