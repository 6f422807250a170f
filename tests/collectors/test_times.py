"""Rates and shares of time, from the times of batches."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trawl.collectors.watch.times import (
    WORKER_PARTS,
    BatchTimes,
    DriverTimes,
    TurnClock,
    WorkerTimes,
    shares_of,
)
from trawl.rollout.times import LoopTimes, estimated_sum

SECONDS = st.floats(0, 10)


def batch(began, idle=0.0, env=0.0, policy=0.0, weights=0.0, overhead=0.0):
    ended = began + env + policy + weights + overhead
    return BatchTimes(began, began, began, ended, ended, env, policy, weights, idle)


def test_shares_and_seconds_divide_the_time():
    times = WorkerTimes()
    times.add(batch(10.0, env=2.0, policy=1.0, overhead=0.5, weights=0.5), 40)
    times.add(batch(15.0, idle=1.0, env=2.0, policy=1.0), 60)
    facts = times.stats()
    assert [facts[f"{part}_seconds"] for part in WORKER_PARTS] == [4.0, 2.0, 0.5, 0.5, 1.0]
    assert [facts[f"{part}_share"] for part in WORKER_PARTS] == [0.5, 0.25, 0.0625, 0.0625, 0.125]
    assert facts["frames_per_second"] == facts["frames_per_second_overall"] == 100 / 8
    other = WorkerTimes()
    other.add(batch(0.0, policy=8.0), 10)
    facts = shares_of([times, other])
    assert (facts["env_share"], facts["policy_share"]) == (4 / 16, 10 / 16)
    assert (facts["env_seconds"], facts["policy_seconds"]) == (4, 10)


def test_old_batches_count_only_for_the_totals():
    assert WorkerTimes().stats() == DriverTimes().stats() == shares_of([WorkerTimes()]) == {}
    times = WorkerTimes()
    times.add(batch(0.0, env=1000.0), 10)
    # A single batch counts however long it took.
    assert times.stats()["frames_per_second"] == 0.01
    for start in range(1000, 1040):
        times.add(batch(float(start), policy=1.0), 50)
    facts = times.stats()
    assert facts["env_share"] == 0
    assert facts["policy_share"] == 1
    assert facts["frames_per_second"] == 50
    assert facts["env_seconds"] == 1000
    assert facts["frames_per_second_overall"] == pytest.approx((10 + 40 * 50) / 1040)


def test_time_before_the_first_turn_counts_for_nobody():
    clock = TurnClock()
    clock.begin()
    assert clock.paused == 0
    clock.end()
    clock.begin()
    assert clock.paused > 0


@given(st.lists(SECONDS), st.integers(0, 1000))
def test_durations_that_were_not_measured_take_as_long_as_the_others(samples, missing):
    count = len(samples) + missing
    expected = sum(samples)
    if len(samples) > 1:
        expected += missing * statistics.fmean(samples[1:])
    assert estimated_sum(samples, count) == pytest.approx(expected)


def test_the_policy_takes_no_longer_than_the_loop():
    loop = LoopTimes()
    loop.add(2.0, acting=3.0)
    assert (loop.env, loop.policy) == (0, 2)
