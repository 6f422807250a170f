"""How old the policy of a batch may be when the batch is delivered."""

import threading
from contextlib import suppress

import pytest
from collector_parts import Buffer
from hypothesis import given
from hypothesis import strategies as st
from multi_parts import Chooser, make

from trawl.collectors import MultiAsyncCollector, MultiSyncCollector
from trawl.collectors.lag import LagBound, Lags
from trawl.testing import Ledger, NumberedEnv

LAG = "policy_lag_"


def inline(workers=3, **options):
    return make(
        MultiAsyncCollector, workers=workers, policy=Chooser(1), start_method="inline", **options
    )


# --- the bound


@given(st.integers(0, 5), st.integers(1, 4), st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_no_batch_is_older_than_it_may_be(most, workers, updates):
    with inline(workers, max_policy_lag=most, track_policy_version=True) as collector:
        for count in updates:
            batch = collector.next()
            assert (
                collector.policy_version_tracker.version - int(batch["policy_version"].min())
                <= most
            )
            for _ in range(count):
                try:
                    collector.update_policy_weights_()
                except RuntimeError:
                    break
        assert collector.stats()[f"{LAG}max"] <= most


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_as_many_updates_each_time_are_never_refused(updates, workers, more):
    with inline(workers, max_policy_lag=updates + more) as collector:
        for _ in range(20):
            collector.next()
            for _ in range(updates):
                collector.update_policy_weights_()


def test_workers_are_held_back_and_nothing_is_thrown_away():
    sources = [NumberedEnv(number) for number in range(3)]
    ledger = Ledger(sources)
    options = {"frames_per_batch": 5, "total_frames": 150, "max_policy_lag": 1}
    with MultiAsyncCollector(
        [lambda env=env: env for env in sources], Chooser(1), start_method="inline", **options
    ) as collector:
        for batch in collector:
            ledger.add(batch)
            collector.update_policy_weights_()
        assert collector.stats()["frames"] == ledger.frames == 150


def test_all_workers_have_their_turn():
    with inline(3, max_policy_lag=0) as collector:
        for _ in range(6):
            collector.next()
            collector.update_policy_weights_()
        stats = collector.stats("per_worker")
    assert [stats[f"worker_{index}/batches"] for index in range(3)] == [2, 2, 2]


def test_an_update_that_makes_a_batch_too_old_is_refused_and_changes_nothing():
    with inline(2, max_policy_lag=2, track_policy_version=True) as collector:
        collector.next()
        for _ in range(2):
            collector.update_policy_weights_()
        with pytest.raises(
            RuntimeError, match=r"3 updates old, but max_policy_lag=2\. Take a batch"
        ):
            collector.update_policy_weights_()
        assert collector.policy_version_tracker.version == 2
        assert collector.next() is not None


def test_updates_before_the_first_batch_are_free():
    with inline(2, max_policy_lag=0) as collector:
        for _ in range(3):
            collector.update_policy_weights_()
        collector.next()
        assert collector.stats()[f"{LAG}max"] == 0


def test_random_frames_are_never_too_old():
    with inline(3, max_policy_lag=0, init_random_frames=60) as collector:
        for _ in range(10):
            collector.next()
            collector.update_policy_weights_()


def test_an_update_waits_while_batches_go_to_a_buffer():
    buffer = Buffer()
    with make(
        MultiAsyncCollector, policy=Chooser(1), replay_buffer=buffer, max_policy_lag=1
    ) as collector:
        collector.start()
        for _ in range(30):
            collector.update_policy_weights_()
        assert collector.stats()[f"{LAG}max"] <= 1


def test_within_a_pause_an_update_does_not_wait_for_ever():
    with make(
        MultiAsyncCollector, policy=Chooser(1), replay_buffer=Buffer(), max_policy_lag=1
    ) as collector:
        collector.start()
        with collector.pause(), suppress(RuntimeError):
            for count in range(10):
                assert count < 9
                collector.update_policy_weights_()


def test_synchronous_collectors_have_no_lag_to_limit():
    with pytest.raises(ValueError, match="max_policy_lag=1 needs sync=False"):
        make(MultiSyncCollector, policy=Chooser(1), max_policy_lag=1)


@pytest.mark.parametrize(("value", "kind"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_the_limit_is_a_number(value, kind):
    with pytest.raises(kind, match="max_policy_lag"):
        inline(max_policy_lag=value)


# --- how old they were


def test_the_lag_of_frames_is_in_the_statistics():
    with inline(1, frames_per_batch=5) as collector:
        for _ in range(6):
            collector.next()
            collector.update_policy_weights_()
        stats = collector.stats()
    lags = {name: value for name, value in stats.items() if name.startswith(LAG)}
    assert sum(value for name, value in lags.items() if name[len(LAG) :].isdigit()) == 30
    assert lags[f"{LAG}max"] == max(int(n[len(LAG) :]) for n in lags if n[len(LAG) :].isdigit())


def test_lags_are_counted_by_frames():
    lags = Lags()
    assert lags.stats() == {}
    for lag, frames in ((0, 3), (2, 1), (0, 4)):
        lags.add(lag, frames)
    assert lags.stats() == {f"{LAG}mean": 0.25, f"{LAG}max": 2, f"{LAG}0": 7, f"{LAG}2": 1}


def test_a_batch_that_has_to_wait_no_longer_goes_first():
    counts = [0, 0]
    bound = LagBound(2, counts.__getitem__)
    bound.grow(range(2))
    bound.ordered(1, 0)
    counts[:] = [1, 1]
    # Now it is known that there is one update at a time.
    bound.begin()
    bound.ordered(2, 1)
    assert bound.choose([2]) == 2
    bound.ordered(3, 1)
    # If the second went first, the first would be two updates old at its turn, and the third one;
    # if that were the case twice, it would be three.
    counts[:] = [2, 2]
    bound.begin()
    assert bound.choose([3, 2]) is None
    assert bound.choose([3, 1]) == 1


def test_updates_from_another_thread_keep_the_bound():
    with make(
        MultiAsyncCollector, policy=Chooser(1), max_policy_lag=2, track_policy_version=True
    ) as collector:
        going = threading.Event()

        def update():
            while not going.is_set():
                try:
                    collector.update_policy_weights_()
                except RuntimeError:
                    going.wait(0.001)

        thread = threading.Thread(target=update)
        thread.start()
        for _ in range(40):
            collector.next()
        going.set()
        thread.join()
        assert collector.stats()[f"{LAG}max"] <= 2
