"""How old the policy of a batch may be when the batch is delivered."""

import random
import threading
from collections import Counter
from contextlib import suppress

import pytest
from collector_parts import Buffer
from hypothesis import given, settings
from hypothesis import strategies as st
from multi_parts import Chooser, envs, make

from trawl.backends import InlineBackend
from trawl.collectors import MultiAsyncCollector, MultiSyncCollector
from trawl.collectors.distributed import DistributedCollector
from trawl.collectors.workers.lag import LagBound
from trawl.testing import Ledger, NumberedEnv
from trawl.weights.message_schemes import MessageWeightSyncScheme

LAG = "policy_lag_"


def inline(workers=3, **options):
    return make(
        MultiAsyncCollector, workers=workers, policy=Chooser(1), start_method="inline", **options
    )


class UnevenBackend(InlineBackend):
    """A backend in this process, whose workers run ahead, and some are slow to send batches."""

    def __init__(self, *args):
        super().__init__(*args)
        self._drawn, self._on_the_way = random.Random(0), []

    def wait(self, timeout=None):
        for _ in range(self._drawn.randrange(4)):
            busy = [worker for worker in self._workers if worker.busy]
            if busy:
                self._drawn.choice(busy).work()
        if self._events or not self._on_the_way:
            self._on_the_way += super().wait(timeout)
        first = {event.worker: event for event in reversed(self._on_the_way)}
        slow_last = [0.3**worker.index for worker in first]
        found = self._drawn.choices(list(first.values()), slow_last)
        self._on_the_way.remove(*found)
        return found


class AsyncNode(MultiAsyncCollector):
    """A collector whose workers are in its own process."""

    def _new_backend(self):
        return UnevenBackend()


class SyncNode(MultiSyncCollector):
    """A collector whose workers are in its own process."""

    def _new_backend(self):
        return InlineBackend()


class InlineCluster(DistributedCollector):
    """A collector whose nodes are in its own process."""

    def _new_backend(self):
        return UnevenBackend(False)

    def _new_scheme(self):
        return MessageWeightSyncScheme()


def cluster(nodes=2, each=2, kind=AsyncNode, **options):
    """A collector whose nodes have workers of their own."""
    options = {"frames_per_batch": 10, "track_policy_version": True, **options}
    return InlineCluster(
        envs(nodes), Chooser(1), collector_class=kind, num_workers_per_collector=each, **options
    )


def age(collector, batch):
    return collector.policy_version_tracker.version - int(batch["policy_version"].min())


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
@settings(max_examples=10)
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


@pytest.mark.parametrize(("value", "kind"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_the_limit_is_a_number(value, kind):
    with pytest.raises(kind, match="max_policy_lag"):
        inline(max_policy_lag=value)


# --- how old they were


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


# --- workers with workers of their own


@pytest.mark.parametrize("kind", [AsyncNode, SyncNode])
@pytest.mark.parametrize("sync", [False, True])
def test_the_lag_counts_the_batches_that_wait_at_all_levels(kind, sync):
    ages = Counter()
    with cluster(kind=kind, sync=sync, frames_per_batch=40) as collector:
        for count in (1, 2, 0, 1, 3, 1, 1, 0, 2, 1):
            batch = collector.next()
            versions = batch["policy_version"].reshape(-1)
            if sync:
                # Each node's frames count by the oldest of them.
                versions = versions.reshape(2, -1).min(1).values.repeat_interleave(20)
            newest = collector.policy_version_tracker.version
            ages.update((newest - versions).tolist())
            for _ in range(count):
                collector.update_policy_weights_()
        stats = collector.stats()
    if (kind, sync) != (SyncNode, True):
        assert stats[f"{LAG}mean"] == sum(k * v for k, v in ages.items()) / sum(ages.values())
    found = {int(n[len(LAG) :]): v for n, v in stats.items() if n[len(LAG) :].isdigit()}
    assert found == (ages if (kind, sync) != (SyncNode, True) else {})


@given(
    st.integers(0, 6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 3), min_size=5, max_size=20),
    st.sampled_from([AsyncNode, SyncNode]),
)
@settings(max_examples=10)
def test_no_batch_is_older_than_it_may_be_at_any_level(most, nodes, each, updates, kind):
    with cluster(nodes, each, kind, max_policy_lag=most, frames_per_batch=6) as collector:
        for count in updates:
            assert age(collector, collector.next()) <= most
            for _ in range(count):
                try:
                    collector.update_policy_weights_()
                except RuntimeError:
                    break
        assert collector.stats()[f"{LAG}max"] <= most


def test_a_batch_that_overtakes_another_does_not_make_it_younger():
    counts = [0]
    bound = LagBound(2, counts.__getitem__, in_turn=False)
    bound.grow(range(1))
    bound.ordered(1, 0)
    counts[:] = [2]
    bound.ordered(2, 0)
    # The first answer is the batch that began for the second request.
    bound.made(1, 2)
    bound.delivered(1)
    assert bound.broken_by_update([0])
    bound.made(2, 0)
    bound.delivered(2)
    assert not bound.broken_by_update([0])


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"max_policy_lag": 1}, "which is an option of the whole collector"),
        ({"preemptive_threshold": 0.5}, r"preemptive_threshold=0\.5 in collector_kwargs"),
    ],
)
def test_the_limit_is_one_of_all_levels(own, words):
    with pytest.raises(ValueError, match=words):
        cluster(kind=SyncNode, max_policy_lag=1, collector_kwargs=own)
