"""The gradient noise of pieces: worked values, unbiasedness for ragged pieces, sums that add up."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators import PieceSums, from_pieces, from_two_sizes, trade_off

PIECES = np.array([[1.0, 2.0], [3.0, 0.0], [2.0, 2.0], [0.0, 1.0]])


def measured(gradients: np.ndarray, rows: np.ndarray) -> tuple[float, float, int, int]:
    """n, Q, J and B of mean gradients of pieces with these many rows."""
    shares = rows / rows.sum()
    mean = shares @ gradients
    return float(mean @ mean), float(shares @ (gradients**2).sum(axis=1)), len(rows), int(rows.sum())


def test_the_worked_values() -> None:
    n, q, pieces, batch = measured(PIECES, np.full(4, 8))
    assert (n, q) == (3.8125, 5.75)
    grad, variance = from_pieces(n, q, pieces, batch)
    assert grad == pytest.approx(3.1666667, abs=1e-7)
    assert variance == pytest.approx(20.6666667, abs=1e-7)
    assert variance / grad == pytest.approx(6.5263158, abs=1e-7)


def test_the_trade_off() -> None:
    assert [trade_off(batch, 1000) for batch in (250, 1000, 4000)] == [(5.0, 1.25), (2.0, 2.0), (1.25, 5.0)]


def test_two_sizes_are_pieces_against_their_mean() -> None:
    """The pieces' own size is the small batch: both formulas then say the same."""
    assert from_two_sizes(3.8125, 32, 5.75, 8) == pytest.approx(from_pieces(3.8125, 5.75, 4, 32))


@pytest.mark.parametrize("rows", [[8, 8, 8, 8], [1, 2, 30, 31], [5, 5, 1]])
def test_pieces_of_any_size_are_unbiased(rows: list[int]) -> None:
    rng, counts = np.random.default_rng(0), np.array(rows)
    true = np.array([0.3, -0.4, 0.0, 0.1])
    found = np.zeros(2)
    repeats = 40_000
    for _ in range(repeats):
        noise = rng.normal(size=(len(counts), 4)) * np.sqrt(2.5 / counts[:, None])
        found += from_pieces(*measured(true + noise, counts))
    assert found / repeats == pytest.approx([true @ true, 10.0], rel=0.05)


def test_gaussian_gradients_of_known_noise() -> None:
    """d=50, |G|^2=.25, tr=50, 16 rows a piece, J=4, 4,000 steps: within a few percent of 200."""
    rng, true = np.random.default_rng(1), np.full(50, np.sqrt(0.25 / 50))
    sums = np.zeros(2)
    for _ in range(4_000):
        gradients = true + rng.normal(size=(4, 50)) * np.sqrt(1 / 16)
        sums += from_pieces(*measured(gradients, np.full(4, 16)))
    assert sums[1] / sums[0] == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize("wrong", [lambda: from_pieces(1, 1, 1, 8), lambda: from_two_sizes(1, 8, 1, 8)])
def test_what_cannot_be_told_apart_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        wrong()  # type: ignore[operator]


values = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(values, values), min_size=1, max_size=8), st.integers(0, 8))
def test_sums_add_up_and_survive_json(steps: list[tuple[float, float]], cut: int) -> None:
    parts = [PieceSums.of_step(*step) for step in steps]
    whole = sum(parts[1:], parts[0])
    for piece in (whole, parts[0]):
        assert PieceSums.from_json(json.loads(json.dumps(piece.to_json()))) == piece
    assert whole.steps == len(steps)
    assert whole.means()[0] == pytest.approx(np.mean([grad for grad, _ in steps]), abs=1e-6)
    assert whole.means()[4] == pytest.approx(np.mean([g * v for g, v in steps]), rel=1e-9, abs=1e-3)
