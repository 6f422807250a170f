"""Statistics of evaluations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trawl.extras.evaluation.statistics import bootstrap, interquartile_mean, summarise


def test_a_summary() -> None:
    values = np.random.default_rng(1).normal(10, 3, size=400)
    summary = summarise(values)
    assert summary.mean == pytest.approx(values.mean())
    assert summary.std == pytest.approx(values.std(ddof=1))
    assert summary.sem == pytest.approx(values.std(ddof=1) / 20)
    # For many numbers it comes to the interval of the normal distribution.
    assert summary.low == pytest.approx(values.mean() - 1.96 * summary.sem, abs=0.03)
    assert summary.high == pytest.approx(values.mean() + 1.96 * summary.sem, abs=0.03)
    assert summarise(values) == summary


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(300):
        low, high = bootstrap(generator.exponential(1.0, size=60))
        covered += low <= 1.0 <= high
    # 95 % for many numbers, somewhat less for 60 of a skewed distribution.
    assert 0.88 <= covered / 300 <= 0.99


def test_outliers_do_not_move_the_interquartile_mean() -> None:
    assert interquartile_mean(np.array([1.0, 2.0, 3.0, 1e9])) == 2.5
    assert interquartile_mean(np.array([4.0, 1.0, 5.0, 2.0, 3.0])) == 3.0
    assert interquartile_mean(np.array([7.0])) == 7.0


def test_one_number_says_nothing_of_how_sure_it_is() -> None:
    summary = summarise(np.array([4.0]))
    assert (summary.mean, summary.std, summary.iqm) == (4.0, 0.0, 4.0)
    assert all(math.isnan(x) for x in (summary.sem, summary.low, summary.high))


def test_many_numbers_need_little_memory() -> None:
    low, high = bootstrap(np.arange(1_000_000.0)[::500])
    assert low < 499_750 < high
