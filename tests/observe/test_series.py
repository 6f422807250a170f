from itertools import pairwise

import pytest

from trawl.extras.monitors.progress_state import RecentFrames, ThinnedSeries


@pytest.mark.parametrize("count", [1, 5, 199, 200, 201, 12_345])
def test_a_series_is_bounded_and_even(count):
    series = ThinnedSeries(200)
    for number in range(count):
        series.add(number, 3 * number)
        assert len(series.points) <= 200
    points = series.points
    assert points[0] == (0, 0)
    assert points[-1] == (count - 1, 3 * (count - 1))
    assert all(y == 3 * x for x, y in points)
    gaps = [b[0] - a[0] for a, b in pairwise(points)]
    # The last gap ends with the latest point, wherever that is.
    assert all(gap > 0 for gap in gaps)
    assert count <= 200 or max(gaps) <= 2 * min(gaps[:-1])
    assert len(points) >= min(count, 100)


def test_points_at_the_same_place_are_one():
    series = ThinnedSeries(10)
    for number in range(1000):
        series.add(1.0, number)
    assert series.points == [(1.0, 0), (1.0, 999)]


def test_the_rate_is_that_of_the_last_seconds():
    recent = RecentFrames(0.0, 500)
    assert recent.rate == 0
    for tenth in range(1, 301):
        recent.add(tenth / 10, 500 + 10 * tenth)
    assert recent.rate == pytest.approx(100)
    for tenth in range(301, 501):
        recent.add(tenth / 10, 500 + 3000 + 20 * (tenth - 300))
    assert recent.rate == pytest.approx(200)
    # A minute holds the slow half and the fast one.
    rates = recent.rates(10)
    assert rates[:6] == pytest.approx([100] * 6)
    assert rates[6:] == pytest.approx([200] * 4)


def test_slow_batches_have_a_rate_too():
    recent = RecentFrames(0.0, 0)
    for number in range(1, 50):
        recent.add(40.0 * number, 1000 * number)
    assert recent.rate == pytest.approx(25)
    assert recent.rates(20) == pytest.approx([25] * 20)


def test_fast_batches_take_no_more_memory_and_the_first_moments_have_no_intervals():
    recent = RecentFrames(0.0, 0)
    assert recent.rates(30) == []
    for number in range(1, 100_000):
        recent.add(number / 1000, number)
        if number == 100:
            assert recent.rates(30) == []
        if number == 2000:
            assert recent.rates(30) == pytest.approx([1000] * 4)
            assert recent.rates(1) == []
    assert recent.rate == pytest.approx(1000, rel=0.05)
    assert len(recent._points) <= 300
