"""Functions that a collector calls when it closes, however it does so."""

import gc

import pytest
from multi_parts import make

from trawl import Collector
from trawl.testing import FaultyEnv


def fails(collector):
    with pytest.raises(OSError, match="a fault"):
        list(collector)


def failing(**options):
    return Collector(FaultyEnv(5, OSError("a fault")), frames_per_batch=10, **options)


def single(**options):
    return make(Collector, **options)


def iterated_and_closed(collector):
    list(collector)
    for _ in range(2):
        collector.shutdown()


@pytest.mark.parametrize(
    ("maker", "end"),
    [
        *((maker, end) for maker in (single, make) for end in (iterated_and_closed, None)),
        (failing, fails),
    ],
)
def test_functions_are_called_once_with_the_closed_collector(maker, end):
    called = []

    def first(one):
        called.append(("first", one.closed))
        # It may close the collector and add others, which are called at once.
        one.shutdown()
        one.add_close_callback(lambda other: called.append(("added", other is one)))

    def removed(one):
        called.append("removed")

    collector = maker(total_frames=20)
    collector.add_close_callback(first)
    collector.add_close_callback(removed)
    collector.add_close_callback(lambda one: called.append("last"))
    collector.remove_close_callback(removed)
    collector.remove_close_callback(print)
    assert not called
    if end is not None:
        end(collector)
        collector.remove_close_callback(first)
    del collector
    gc.collect()
    assert sorted(called, key=str) == [("added", True), ("first", True), "last"]
