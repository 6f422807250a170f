"""Successive halving, with a clock of its own, and rates from its rounds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuning_parts import Machine, candidate

from trawl.extras.tuning import Candidate, Trial
from trawl.extras.tuning.halving import (
    TIE,
    Halving,
    adjusted_rates,
    choose,
    rounds_left,
)
from trawl.extras.tuning.trial import Measurement

RATES = st.lists(st.integers(1, 10_000), min_size=1, max_size=40)


def search(machine: Machine, count: int, budget: float, **options) -> tuple[Halving, Trial]:
    measure = options.pop("measure", machine.measure)
    halving = Halving(measure, budget, clock=machine.clock, **options)
    return halving, halving.run([candidate(number) for number in range(count)])


@given(RATES, st.floats(1, 100), st.floats(0, 3))
def test_no_measurement_begins_after_the_budget(rates, budget, start):
    """It is never exceeded if measurements keep their time; equal ones give equal choices."""

    def run(start):
        machine = Machine(lambda one, now: rates[one.frames_per_batch - 1], start)
        begun = []

        def measure(one, seconds):
            begun.append(machine.now)
            return machine.measure(one, seconds)

        _, best = search(machine, len(rates), budget, measure=measure)
        return begun, best, machine.measured, machine.now

    found = run(start)
    assert all(moment < budget for moment in found[0])
    assert run(start) == found
    assert run(0.0)[-1] <= budget + 1e-3


@given(RATES)
def test_the_best_survives(rates):
    machine = Machine(lambda one, now: rates[one.frames_per_batch - 1])
    halving, best = search(machine, len(rates), 60.0)
    assert best.frames_per_second >= (1 - TIE) * max(rates) * (1 - 1e-6)
    assert all(trial.measured for trial in halving.trials.values())


@given(RATES, st.floats(0.2, 5.0))
def test_a_machine_that_becomes_slower_changes_no_choice(rates, change):
    """From the second round on, all candidates are measured under other conditions."""
    count = len(rates)

    def rate(one, now):
        steady = rates[one.frames_per_batch - 1]
        return steady if len(machine.measured) <= count else change * steady

    machine = Machine(rate)
    # So short a time that each candidate has one turn in the first round.
    _, best = search(machine, count, 0.7 * rounds_left(count, False))
    # Rates of dropped candidates are compared too, so that a tie may end otherwise.
    assert rates[best.candidate.frames_per_batch - 1] >= (1 - TIE) * max(rates) * (1 - 1e-6)


def test_neighbours_of_the_best_are_tried_once():
    asked = []

    def neighbours(one):
        asked.append(one)
        return [Candidate(workers=9, frames_per_batch=one.frames_per_batch)]

    machine = Machine(lambda one, now: 10.0 * one.frames_per_batch + 100 * one.workers)
    halving, best = search(machine, 10, 60.0, neighbours=neighbours)
    assert best.candidate.workers == 9
    assert asked == [candidate(9), candidate(8), candidate(7)]
    assert len(halving.trials) == 13


@pytest.mark.parametrize(
    ("fails", "count", "budget", "chosen", "failed"),
    [
        # It is not tried again.
        (lambda one, again: one == candidate(0), 2, 10.0, 1, {0: False}),
        # In a later round.
        (lambda one, again: one == candidate(3) and again, 4, 60.0, 2, {3: True}),
        # If the last ones fail, an earlier one is chosen. The time is so short that each candidate
        # has one turn in the first round.
        (lambda one, again: again, 4, 2.0, 1, {2: True, 3: True}),
    ],
    ids=["first", "later", "last"],
)
def test_a_candidate_that_fails_is_dropped_with_its_error(fails, count, budget, chosen, failed):
    machine = Machine(lambda one, now: 10.0 * one.frames_per_batch)
    tried: list[Candidate] = []

    def measure(one, seconds):
        tried.append(one)
        if fails(one, tried.count(one) > 1):
            raise OSError("out of memory\nand more")
        return machine.measure(one, seconds)

    halving, best = search(machine, count, budget, measure=measure)
    assert best.candidate == candidate(chosen)
    for number in range(count):
        trial = halving.trials[candidate(number)]
        assert trial.measured == (number not in failed)
        assert trial.error == ("OSError: out of memory" if number in failed else None)
        assert (trial.frames_per_second == 0) == (number in failed)
        if number in failed:
            assert tried.count(candidate(number)) == 1 + failed[number]
    assert len(halving.errors) == len(failed)


def test_the_time_may_end_between_two_looks_at_the_clock():
    """For each look at the clock, there is a search whose time is over right then."""
    rates = [10.0, 20.0, 30.0, 40.0]
    for last in range(1, 200):
        looks = itertools.count()
        machine = Machine(lambda one, now: rates[one.frames_per_batch - 1])

        def clock(machine=machine, looks=looks, last=last):
            return machine.now if next(looks) < last else 1e9

        halving = Halving(machine.measure, 10.0, clock=clock)
        assert halving.run([candidate(i) for i in range(4)]).measured
        if next(looks) <= last:
            return
    raise AssertionError("the search did not end")


def test_if_all_fail_the_first_error_is_the_cause():
    def measure(one, seconds):
        raise ZeroDivisionError(str(one.frames_per_batch))

    # Time stands still, so that the search does not end because the time is over.
    with pytest.raises(RuntimeError, match="no layout could be measured") as raised:
        Halving(measure, 10.0, clock=lambda: 0.0).run([candidate(4), candidate(2)])
    assert str(raised.value.__cause__) == "5"


def test_an_interruption_ends_the_search():
    def measure(one, seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Halving(measure, 10.0).run([candidate(0)])


def test_without_time_only_the_first_is_measured():
    machine = Machine(lambda one, now: 10.0, start=5.0)
    halving, best = search(machine, 3, 1.0)
    assert machine.measured == [candidate(0)]
    assert best.candidate == candidate(0)
    assert [trial.measured for trial in halving.trials.values()] == [True, False, False]


def test_slow_starts_make_longer_turns():
    """Otherwise, almost all of the time would go to the starts."""
    machine = Machine(lambda one, now: 100.0, start=1.0)
    halving, _ = search(machine, 2, 64.0)
    assert len(machine.measured) < 2 * 64.0 / (1.0 + 3.0)
    assert sum(trial.seconds for trial in halving.trials.values()) > 64.0 / 2


def trial(number: int, rate: float, seconds: float = 1.0, **numbers) -> Trial:
    return Trial(candidate(number, **numbers), rate, seconds)


def test_a_simpler_candidate_wins_a_tie_unless_its_measurement_was_brief():
    trials = [trial(0, 100, workers=4), trial(0, 98, workers=2), trial(0, 96)]
    assert choose(trials, [each.candidate for each in trials]) == trials[1]
    trials = [trial(0, 100, 10.0, workers=2), trial(0, 100, 1.0)]
    assert choose(trials, [trials[0].candidate]) == trials[0]


# --- rates of candidates that were measured under different conditions

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


@pytest.mark.parametrize(
    ("rounds", "rates"),
    [
        ([], {}),
        ([{}], {}),
        # A new candidate is compared under its own conditions.
        (
            [
                {A: Measurement(100, 1.0), B: Measurement(80, 1.0)},
                {A: Measurement(50, 1.0), C: Measurement(45, 1.0)},
            ],
            {A: 50, B: 40, C: 45},
        ),
        # Longer measurements count for more.
        (
            [
                {A: Measurement(100, 1.0), B: Measurement(100, 1.0)},
                {A: Measurement(200, 1.0), B: Measurement(50 * 1000, 1000.0)},
            ],
            {A: 141, B: 50},
        ),
        # Rounds without a common candidate are taken as they are.
        ([{A: Measurement(10, 1.0)}, {B: Measurement(20, 1.0)}], {A: 10, B: 20}),
    ],
)
def test_rates_are_adjusted(rounds, rates):
    assert adjusted_rates(rounds) == pytest.approx(rates, rel=0.01)
