"""What tests of timelines have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trawl.observe import Span, Timeline, read_trace

# Times in files are whole nanoseconds, and sums of many are compared.
ROUNDED = 1e-7
PARTS = ("env", "policy", "weights")


def assert_nested(spans: list[Span]) -> None:
    """Checks that any two spans of a lane are disjoint, or one contains the other."""
    around: list[Span] = []
    for span in spans:
        while around and around[-1].end <= span.start + ROUNDED:
            around.pop()
        assert not around or span.end <= around[-1].end + ROUNDED, (span, around[-1])
        around.append(span)


def assert_lanes_nest(timeline: Timeline) -> None:
    """Checks all lanes."""
    assert timeline.complete
    assert {span.lane for span in timeline.spans} <= set(timeline.lanes)
    for lane in timeline.lanes:
        assert_nested(timeline.lane(lane))


def assert_sums(
    timeline: Timeline, lane: str, stats: dict[str, Any], prefix: str = "", nested: bool = False
) -> None:
    """Checks the sums of a worker's lane against its statistics.

    A worker that has not finished a batch yet has neither spans nor seconds.
    """
    of = {part: timeline.seconds(lane, part) for part in (*PARTS, "wait", "batch")}
    for part in PARTS:
        assert of[part] == pytest.approx(stats.get(f"{prefix}{part}_seconds", 0), abs=ROUNDED)
    assert of["wait"] == pytest.approx(stats.get(f"{prefix}idle_seconds", 0), abs=ROUNDED)
    rest = of["batch"] - sum(of[part] for part in PARTS)
    overhead = stats.get(f"{prefix}overhead_seconds", 0)
    if nested:
        # Inner workers may collect for longer than a batch takes; the rest of none is negative.
        assert rest <= overhead + ROUNDED
    else:
        assert rest == pytest.approx(overhead, abs=ROUNDED)


def assert_learner(timeline: Timeline, stats: dict[str, Any]) -> None:
    """Checks the sums of the learner's lane."""
    of = {name: timeline.seconds("learner", name) for name in ("learn", "wait", "collect")}
    assert of["learn"] == pytest.approx(stats["learner_seconds"], abs=ROUNDED)
    assert of["wait"] == pytest.approx(stats["wait_seconds"], abs=ROUNDED)
    assert of["collect"] - of["wait"] == pytest.approx(stats["driver_seconds"], abs=ROUNDED)


def delivered(timeline: Timeline) -> list[tuple[int, int]]:
    """Returns the worker and the number of each delivered batch, in order."""
    return [
        (one.args["worker"], one.args["request"])
        for one in timeline.instants
        if one.name == "deliver"
    ]


def drawn(timeline: Timeline, workers: int) -> list[tuple[int, int]]:
    """Returns the worker and the number of each batch in the lanes of workers."""
    return [
        (index, span.args["request"])
        for index in range(workers)
        for span in timeline.lane(f"worker {index}")
        if span.name == "batch"
    ]


def reasons(path: Path, workers: int) -> set[str]:
    """Returns why workers were not asked for batches earlier."""
    timeline = read_trace(path)
    waits = [
        span
        for index in range(workers)
        for span in timeline.lane(f"worker {index}")
        if span.name == "wait"
    ]
    return {span.args["reason"] for span in waits}


def assert_whole(
    timeline: Timeline, stats: dict[str, Any], workers: int = 2, nested: bool = False
) -> None:
    """Checks a timeline of a whole run of a collector with workers.

    Args:
        timeline: the timeline.
        stats: ``stats("both")`` after the end.
        workers: number of workers.
        nested: True if the workers' collectors have workers.
    """
    assert_lanes_nest(timeline)
    names = [f"worker {index}" for index in range(workers)]
    assert [lane for lane in timeline.lanes if "steps" not in lane][:2] == ["learner", "scheduler"]
    assert set(names) <= set(timeline.lanes)
    assert_learner(timeline, stats)
    for index, name in enumerate(names):
        assert_sums(timeline, name, stats, f"worker_{index}/", nested)
    found = delivered(timeline)
    assert len(set(found)) == len(found)
    seen = drawn(timeline, workers)
    assert len(set(seen)) == len(seen)
    # A worker may have finished a batch that nobody took.
    assert set(found) <= set(seen)
    asked = [one.args["request"] for one in timeline.instants if one.name == "request"]
    assert {number for _, number in seen} <= set(asked)
    assert (
        sum(one.args["frames"] for one in timeline.instants if one.name == "deliver")
        == (stats["frames"])
    )
