"""The search for the largest micro-batch: few sizes tried, close to the truth, never beyond the bounds."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.probing import TOLERANCE, MicroBatchSearch

CAPACITY = 16e9
STARTS = [1, 2, 8, 16, 32, 64, 256, 1000, 4096, 20_000]


def run(search: MicroBatchSearch, peak: Callable[[int], float], capacity: float = CAPACITY) -> int:
    """Run a search on a simulated memory; returns the number of sizes tried."""
    while (rows := search.propose()) is not None:
        assert 1 <= rows <= search.most
        assert rows not in search.peaks
        assert len(search.peaks) < 30
        search.record(rows, peak(rows) if peak(rows) <= capacity else None)
    assert search.best is None or search.best in search.peaks
    return len(search.peaks)


def bent(maximum: int, at: int, factor: float, base: float, target: float) -> Callable[[int], float]:
    """Peaks along a line with one bend, such that exactly ``maximum`` rows fit."""
    slope = (target - base) / (at + factor * (maximum - at) + 0.5 * factor)
    return lambda rows: base + slope * (min(rows, at) + factor * max(rows - at, 0))


worlds = st.fixed_dictionaries(
    {
        "maximum": st.integers(1, 10_000) | st.integers(1, 100),
        "start": st.sampled_from(STARTS),
        "base": st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.8, 0.95]),
        "headroom": st.sampled_from([0.05, 0.1, 0.2, 0.3]),
        "most": st.sampled_from([1_000_000, 20_000]) | st.integers(1, 12_000),
    }
)


def check(world: dict[str, float], factor: float, at: float, most_tries: int) -> None:
    maximum, most = int(world["maximum"]), int(world["most"])
    target = CAPACITY * (1 - world["headroom"])
    bend = max(1, int(maximum * at)) if factor != 1 else maximum
    peak = bent(maximum, bend, factor, world["base"] * target, target)
    search = MicroBatchSearch(int(world["start"]), most, target)
    tries = run(search, peak)
    truth = min(maximum, most)
    assert search.best is not None
    assert (1 - TOLERANCE) * truth <= search.best <= truth
    assert tries <= most_tries


@settings(max_examples=500)
@given(worlds)
def test_where_the_peak_is_a_line_five_sizes_are_enough(world: dict[str, float]) -> None:
    check(world, 1.0, 1.0, 5)


@settings(max_examples=800)
@given(worlds, st.sampled_from([0.5, 0.6, 0.75, 0.9, 1.1, 1.3, 1.6, 2.0]), st.floats(0.02, 0.98))
def test_where_the_slope_changes_once_eight_are(world: dict[str, float], factor: float, at: float) -> None:
    check(world, factor, at, 8)


@settings(max_examples=800)
@given(
    worlds,
    st.sampled_from([0.5, 0.75, 1.0, 1.3, 2.0]),
    st.floats(0.02, 0.98),
    st.randoms(use_true_random=False),
    st.sampled_from([0.0, 3e-4]),
)
def test_where_too_much_ends_the_process_it_comes_from_below(
    world: dict[str, float], factor: float, at: float, chance: random.Random, scatter: float
) -> None:
    """Whatever the slope does, up to twice what it was; and with readings that scatter.

    The next size must not end the process even at twice the slope, or along a square: with a limit of a few
    rows there is none, so up to four are missed (counted over all worlds of up to 60 rows).
    """
    maximum, most = int(world["maximum"]), int(world["most"])
    target = CAPACITY * (1 - world["headroom"])
    bend = max(1, int(maximum * at)) if factor != 1 else maximum
    peak = bent(maximum, bend, factor, world["base"] * target, target)
    search = MicroBatchSearch(int(world["start"]), most, target, ends_at_bytes=CAPACITY)
    while (rows := search.propose()) is not None:
        assert peak(rows) <= CAPACITY
        assert 1 <= rows <= most
        noisy = peak(rows) + chance.uniform(-scatter, scatter) * CAPACITY
        search.record(rows, noisy, peak(0) + chance.uniform(-scatter, scatter) * CAPACITY)
    truth = min(maximum, most)
    assert len(search.peaks) <= 16
    assert search.best is not None
    assert search.best >= (1 - TOLERANCE if not scatter and world["headroom"] >= 0.1 else 0.5) * truth - 4


@settings(max_examples=300)
@given(worlds, st.floats(0, 1))
def test_nor_does_a_peak_that_grows_with_the_square_of_the_rows(
    world: dict[str, float], squared: float
) -> None:
    """All pairs of rows, as in a contrastive loss."""
    target, base, maximum = CAPACITY * (1 - world["headroom"]), world["base"], int(world["maximum"])

    def peak(rows: int) -> float:
        part = rows / (maximum + 0.5)
        return target * (base + (1 - base) * ((1 - squared) * part + squared * part**2))

    search = MicroBatchSearch(16, int(world["most"]), target, ends_at_bytes=CAPACITY)
    while (rows := search.propose()) is not None:
        assert peak(rows) <= CAPACITY
        search.record(rows, peak(rows), peak(0))
    assert (search.best or 0) >= 0.97 * min(maximum, search.most) - 8


def test_a_plateau_before_the_rise_is_no_trap() -> None:
    """What an optimizer takes for a moment hides the first rows; and an allocator's blocks the last ones."""
    search = MicroBatchSearch(16, 1_000_000, 1.0)
    run(search, lambda rows: max(0.4, rows / 156_164), capacity=1.2)
    assert search.best is not None
    assert search.best >= 0.97 * 156_164
    search = MicroBatchSearch(8, 1_000_000, 1.0)
    run(search, lambda rows: 0.084 + 1e-5 * -(-rows * 4.52e-6 // 1e-5), capacity=1.2)
    assert search.best is not None
    assert search.best >= 0.97 * 202_600


def test_the_worked_value() -> None:
    """8 rows take 3 GiB, 32 take 7.5 GiB: of 16 GiB with 10 % head-room, 68 fit."""
    search = MicroBatchSearch(8, 1000, 0.9 * 16)
    assert search.propose() == 8
    search.record(8, 3.0)
    search.propose()
    search.record(32, 7.5)
    assert search.propose() == 68


def test_rounding_of_an_allocator_changes_little() -> None:
    """Peaks in whole blocks of 2 MiB, as CUDA's allocator takes them."""
    block, target = 2 * 2**20, 0.9 * CAPACITY
    for maximum in (3, 17, 250, 3_000):
        line = bent(maximum, maximum, 1.0, 0.4 * target, target)
        search = MicroBatchSearch(8, 10_000, target)
        assert run(search, lambda rows: -(-line(rows) // block) * block) <= 8  # noqa: B023
        assert search.best is not None
        assert search.best >= 0.95 * maximum - 1


def test_the_largest_allowed_is_itself_tried_and_never_exceeded() -> None:
    search = MicroBatchSearch(8, 100, 0.9 * CAPACITY)
    run(search, lambda rows: 1e9 + 1e6 * rows)
    assert search.best == 100
    assert max(search.peaks) == 100


def test_where_not_even_one_row_fits_there_is_no_answer() -> None:
    search = MicroBatchSearch(32, 100, 0.9 * CAPACITY)
    assert run(search, lambda rows: 2 * CAPACITY) == 2
    assert list(search.peaks) == [32, 1]
    assert search.best is None


@pytest.mark.parametrize("maximum", [1, 5, 40, 3_000])
@pytest.mark.parametrize("start", [2, 96, 9_000])
def test_a_limit_that_nobody_can_read_is_closed_in_on(maximum: int, start: int) -> None:
    """Memory ends long before the capacity that is said: a tenth below what was found within a tenth."""
    search = MicroBatchSearch(start, 10_000, 0.9 * CAPACITY)
    tries = run(search, lambda rows: 1e9 + 1e4 * rows if rows <= maximum else 2 * CAPACITY)
    assert tries <= 17
    assert search.best is not None
    assert 0.8 * maximum - 1 <= search.best <= maximum
    assert maximum < 10 or search.best <= 0.91 * maximum


def test_numbers_that_are_none_fail() -> None:
    search = MicroBatchSearch(8, 100, 1.0)
    for peak in (float("nan"), float("inf")):
        rows = search.propose()
        assert rows is not None
        search.record(rows, peak)
    assert search.propose() is None
    assert search.best is None


def test_what_is_a_limit() -> None:
    """A line that says where it ends is one, though nothing failed."""
    search = MicroBatchSearch(1, 1_000_000, 0.9 * CAPACITY)
    run(search, lambda rows: 2e9)
    assert not search.is_limited
    search = MicroBatchSearch(1, 1_000_000, 0.9 * CAPACITY)
    run(search, lambda rows: 1e9 + 1e7 * rows)
    assert search.best == 1340
    assert search.is_limited


def test_fractions_are_searched_as_bytes_are() -> None:
    tried = []
    for unit in (1.0, CAPACITY):
        search = MicroBatchSearch(8, 100_000, unit)
        run(search, lambda rows: unit * (0.05 + rows / 12_345), capacity=unit * 1.1)  # noqa: B023
        tried.append(list(search.peaks))
    assert tried[0] == tried[1]


def test_peaks_that_do_not_grow_end_at_the_largest() -> None:
    search = MicroBatchSearch(4, 10_000, 0.9 * CAPACITY)
    assert run(search, lambda rows: 2e9) <= 8
    assert search.best is not None
    assert search.best >= 1000


@pytest.mark.parametrize(("start", "most", "least"), [(0, 5, 1), (5, 0, 1), (5, 5, 0), (1, 5, 2)])
def test_sizes_below_the_least_are_refused(start: int, most: int, least: int) -> None:
    with pytest.raises(ConfigError, match="allowed: at least 1, in this order"):
        MicroBatchSearch(start, most, 1.0, least)


@pytest.mark.parametrize("maximum", [2, 3, 11, 700])
def test_nothing_below_the_least_is_tried(maximum: int) -> None:
    for start in (2, 9, 4_096):
        search = MicroBatchSearch(start, 5_000, 0.9 * CAPACITY, least=2)
        assert run(search, bent(maximum, maximum, 1.0, 1e9, 0.9 * CAPACITY)) <= 5
        assert min(search.peaks) >= 2
        assert search.best is not None
        assert 0.97 * maximum <= search.best <= maximum
