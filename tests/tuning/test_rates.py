"""Rates of candidates that were measured under different conditions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuning_parts import candidate

from trawl.collectors.tuning.rates import adjusted_rates
from trawl.collectors.tuning.trial import Measurement

A, B, C = map(candidate, range(3))


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6))
def test_common_changes_cancel_out(levels):
    rounds = [
        {A: Measurement(1, 1 / (100 * level)), B: Measurement(1, 1 / (50 * level))}
        for level in levels
    ]
    rates = adjusted_rates(rounds)
    assert rates[A] == pytest.approx(100 * levels[-1])
    assert rates[B] == pytest.approx(50 * levels[-1])


def test_a_new_candidate_is_compared_under_its_own_conditions():
    rounds = [
        {A: Measurement(100, 1.0), B: Measurement(80, 1.0)},
        {A: Measurement(50, 1.0), C: Measurement(45, 1.0)},
    ]
    rates = adjusted_rates(rounds)
    assert [round(rates[each]) for each in (A, B, C)] == [50, 40, 45]


def test_longer_measurements_count_for_more():
    rounds = [
        {A: Measurement(100, 1.0), B: Measurement(100, 1.0)},
        {A: Measurement(200, 1.0), B: Measurement(50 * 1000, 1000.0)},
    ]
    rates = adjusted_rates(rounds)
    assert rates[A] == pytest.approx(141, rel=0.01)
    assert rates[B] == pytest.approx(50, rel=0.01)


def test_rounds_without_a_common_candidate_are_taken_as_they_are():
    rates = adjusted_rates([{A: Measurement(10, 1.0)}, {B: Measurement(20, 1.0)}])
    assert rates == {A: pytest.approx(10), B: pytest.approx(20)}


def test_no_measurements_no_rates():
    assert adjusted_rates([]) == adjusted_rates([{}]) == {}
