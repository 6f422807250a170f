"""Spans of batches: they have the right sums, and never overlap by a nanosecond."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trawl.collectors.watch.times import BatchTimes
from trawl.collectors.watch.tracer import BatchLane, Pieces
from trawl.observe.timeline_file import TraceWriter

# What time.perf_counter() returns: whole nanoseconds, as a float of seconds.
gaps = st.integers(0, 10**9)
shares = st.floats(0, 1)


@st.composite
def batches(draw, most=10**15):
    """Batches one after the other, whose loops are divided at any point."""
    now, found = draw(st.integers(0, most)), []
    for _ in range(draw(st.integers(1, 10))):
        idle, weights, before, loop, after = (draw(gaps) for _ in range(5))
        began = now + idle
        loop_began = began + weights + before
        loop_ended = loop_began + loop
        now = loop_ended + after
        points = [one / 1e9 for one in (began, began, loop_began, loop_ended, now)]
        seconds = points[3] - points[2]
        share = draw(shares)
        policy = seconds * share
        env = seconds * (1 - share)
        found.append(BatchTimes(*points, env, policy, weights / 1e9, idle / 1e9))
    return found


@given(batches(most=10**11))
def test_sums_are_those_of_the_times(found):
    pieces, sums = Pieces(), {"policy": 0.0, "env": 0.0, "weights": 0.0}
    for times in found:
        for piece in pieces.of(times):
            assert piece.seconds is None
            sums[piece.name] += piece.ended - piece.began
    for name, total in sums.items():
        true = sum(getattr(times, name) for times in found)
        # What is left over is half a nanosecond for each name, and one if both were rounded down.
        assert total == pytest.approx(true, abs=2e-9)


def as_perfetto(microseconds, cuts):
    """A time in whole nanoseconds, as readers convert it."""
    return int(microseconds * 1000) if cuts else round(microseconds * 1000)


@given(batches(), st.floats(-1e5, 0), st.booleans())
def test_no_span_overlaps_by_a_nanosecond(tmp_path_factory, found, offset, cuts):
    path = tmp_path_factory.mktemp("lanes") / "run.json"
    writer = TraceWriter(path, pytest.fail)
    lane = BatchLane(writer, 1, "worker 0")
    for times in found:
        lane.draw(times, {}, None, round(offset, 9))
    writer.close({})
    spans = []
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            start = as_perfetto(event["ts"], cuts)
            spans.append((start, -as_perfetto(event["dur"], cuts), event["name"]))
    around = []
    for start, less, name in sorted(spans):
        end = start - less
        while around and around[-1][1] <= start:
            around.pop()
        assert not around or end <= around[-1][1], (name, around[-1])
        around.append((name, end))


def test_a_span_that_does_not_fit_says_how_long_it_is():
    times = BatchTimes(10.0, 10.0, 10.0, 11.0, 11.0, 5.0, 0.5, 0.0, 0.0)
    policy, env = Pieces().of(times)
    assert policy == ("policy", 10.0, 10.5, None)
    assert env == ("env", 10.5, 11.0, 5.0)
