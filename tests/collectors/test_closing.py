import gc

import pytest

from trawl import Collector, MultiSyncCollector
from trawl.testing import FaultyEnv

OPTIONS = {"frames_per_batch": 10, "total_frames": 20}


def make(workers):
    if not workers:
        return Collector("CartPole-v1", **OPTIONS)
    return MultiSyncCollector(["CartPole-v1"] * workers, **OPTIONS)


@pytest.fixture(params=[0, 2])
def collector(request):
    return make(request.param)


def test_functions_are_called_once_with_the_closed_collector(collector):
    called = []
    collector.add_close_callback(lambda one: called.append((one, one.closed)))
    list(collector)
    assert not called
    collector.shutdown()
    collector.shutdown()
    assert called == [(collector, True)]


def test_functions_may_be_removed(collector):
    called = []
    collector.add_close_callback(called.append)
    collector.remove_close_callback(called.append)
    collector.remove_close_callback(print)
    collector.shutdown()
    collector.remove_close_callback(called.append)
    assert not called


def test_a_closed_collector_calls_at_once(collector):
    collector.shutdown()
    called = []
    collector.add_close_callback(called.append)
    assert called == [collector]


@pytest.mark.parametrize("workers", [0, 2])
def test_functions_are_called_if_the_collector_is_dropped(workers):
    called = []
    collector = make(workers)
    collector.add_close_callback(lambda one: called.append(one.closed))
    del collector
    gc.collect()
    assert called == [True]


def test_functions_are_called_if_the_collector_fails():
    called = []
    collector = Collector(FaultyEnv(5, OSError("a fault")), **OPTIONS)
    collector.add_close_callback(called.append)
    with pytest.raises(OSError, match="a fault"):
        list(collector)
    assert called == [collector]


def test_a_function_may_close_and_add_others(collector):
    called = []

    def first(one):
        one.shutdown()
        one.add_close_callback(lambda _: called.append("added"))
        called.append("first")

    collector.add_close_callback(first)
    collector.add_close_callback(lambda _: called.append("second"))
    collector.shutdown()
    assert sorted(called) == ["added", "first", "second"]
