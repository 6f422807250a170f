"""Alignment of the clocks of workers on other machines."""

import math

from hypothesis import given
from hypothesis import strategies as st

from trawl.collectors.workers.tracer import RemoteClock, SharedClock

# Multiples of a power of two, so that sums of times are exact.
ticks = st.integers(-(2**30), 2**30).map(lambda ticks: ticks / 1024)
delays = st.integers(0, 2**20).map(lambda ticks: ticks / 1024)
# Each message has a direction, the time at which it was sent, and the time that it took.
messages = st.lists(st.tuples(st.booleans(), ticks, delays), max_size=20)


def exchange(clock, offset, message):
    """Adds a message; ``offset`` is the true offset of the worker's clock."""
    to_worker, sent, delay = message
    if to_worker:
        clock.add_request(sent, sent + delay + offset)
    else:
        clock.add_answer(sent + offset, sent + delay)


@given(ticks, messages)
def test_the_true_offset_is_within_bounds_that_never_widen_and_what_is_used_stays(offset, messages):
    clock, used = RemoteClock(), None
    low, high = clock.low, clock.high
    for message in messages:
        exchange(clock, offset, message)
        used = clock.used if used is None else used
        assert clock.used == used
        assert low <= clock.low <= offset <= clock.high <= high
        low, high = clock.low, clock.high
        for estimate in (clock.offset, clock.used):
            assert abs(estimate - offset) <= clock.error(estimate)
    assert clock.error(clock.offset) <= clock.error(clock.used)
    assert clock.drift == 0


@given(ticks, delays, delays)
def test_the_error_is_half_a_round_trip(offset, there, back):
    clock = RemoteClock()
    assert clock.error(clock.offset) == math.inf
    exchange(clock, offset, (True, 0.0, there))
    assert clock.error(clock.offset) == math.inf
    exchange(clock, offset, (False, 5.0, back))
    assert clock.error(clock.offset) == (there + back) / 2


def test_clocks_of_different_rates_add_to_the_error():
    clock = RemoteClock()
    exchange(clock, 0.0, (True, 0.0, 0.25))
    exchange(clock, 0.0, (False, 0.5, 0.25))
    before = (clock.low, clock.high)
    # The worker's clock is now ahead by more than it can be.
    exchange(clock, 2.0, (False, 100.0, 0.0))
    exchange(clock, -1.0, (True, 200.0, 0.0))
    assert (clock.low, clock.high) == before
    assert clock.error(clock.offset) == 0.25 + 1.75


def test_the_clock_of_this_machine_is_the_driver_s():
    clock = SharedClock()
    exchange(clock, 3.0, (True, 0.0, 0.25))
    exchange(clock, 3.0, (False, 0.0, 0.25))
    assert (clock.offset, clock.used, clock.error(0.0)) == (0, 0, 0)
