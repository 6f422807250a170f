"""Short spins before waits."""

from __future__ import annotations

import os
from typing import Any

import pytest

from trawl.envs.processes.spin import Spin, may_spin


class FakeTime:
    """A clock that a poll moves on, and the polls that were made.

    Args:
        seconds: duration of each poll.
    """

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.polls = 0.0, seconds, 0
        self.events: list[Any] = []

    def clock(self) -> float:
        return self.now

    def poll(self, timeout: float) -> list[Any]:
        assert timeout == 0
        self.polls += 1
        self.now += self.seconds
        return self.events


def polls_of(spin: Spin, time: FakeTime, calls: int) -> list[int]:
    """Returns the number of polls in each of some calls."""
    counts = []
    for _ in range(calls):
        before = time.polls
        spin()
        counts.append(time.polls - before)
    return counts


def test_events_end_a_spin() -> None:
    time = FakeTime(seconds=1.0)
    time.events = [(3, 1)]
    spin = Spin(time.poll, 10.0, time.clock)
    assert spin() == [(3, 1)]
    assert time.polls == 1


def test_a_spin_in_vain_ends_and_the_next_waits_have_none() -> None:
    time = FakeTime(seconds=1.0)
    spin = Spin(time.poll, 2.0, time.clock)
    assert polls_of(spin, time, 12) == [2, 0, 2, 0, 0, 2, 0, 0, 0, 0, 2, 0]


def test_an_event_makes_the_next_waits_spin_again() -> None:
    time = FakeTime(seconds=1.0)
    spin = Spin(time.poll, 2.0, time.clock)
    assert polls_of(spin, time, 3) == [2, 0, 2]
    time.events = [(3, 1)]
    assert polls_of(spin, time, 5) == [0, 0, 1, 1, 1]


def pause_of(spin: Spin, time: FakeTime) -> float:
    """Returns the time until the next spin, which is interrupted, too."""
    began = time.now
    while not polls_of(spin, time, 1)[0]:
        time.now += 1e-4
    return time.now - time.seconds - began


@pytest.mark.parametrize("found", [True, False])
def test_interrupted_spins_make_pauses_that_grow(found: bool) -> None:
    time = FakeTime(seconds=0.003)
    time.events = [(3, 1)] if found else []
    spin = Spin(time.poll, 1e-4, time.clock)
    assert polls_of(spin, time, 1) == [1]
    pauses = [pause_of(spin, time) for _ in range(12)]
    expected = [min(0.02 * 2**index, 1.0) for index in range(12)]
    assert pauses == pytest.approx(expected, abs=2e-4)


def test_a_pause_is_short_again_after_a_while_without_interruptions() -> None:
    time = FakeTime(seconds=0.003)
    spin = Spin(time.poll, 1e-4, time.clock)
    spin()
    assert [pause_of(spin, time) for _ in range(4)][-1] > 0.1
    time.now += 1.0
    assert polls_of(spin, time, 1) == [1]
    assert pause_of(spin, time) == pytest.approx(0.01, abs=2e-4)


def test_processes_spin_if_there_is_a_core_for_each_and_for_their_owner() -> None:
    count = len(os.sched_getaffinity(0))
    assert may_spin(count - 1, lambda _: None)
    assert not may_spin(count, lambda _: None)
    assert not may_spin(2, lambda _: (0, 1))
    assert may_spin(2, lambda index: (index, 2))
