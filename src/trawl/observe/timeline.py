"""Timelines of collections, read from their files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trawl.observe.timeline_file import HEAD, TAIL, events_of, nanoseconds_of, read_lines


class Span(NamedTuple):
    """Span of time in a lane of a timeline.

    Attributes:
        lane: name of the lane, such as ``"worker 0"`` or ``"learner"``.
        name: name of the activity.
        start: seconds from the start of the timeline.
        seconds: duration in seconds.
        args: further facts, such as ``"frames"``.
    """

    lane: str
    name: str
    start: float
    seconds: float
    args: Mapping[str, Any]

    @property
    def end(self) -> float:
        """Seconds from the start of the timeline to the end of the span."""
        return self.start + self.seconds


class Instant(NamedTuple):
    """Point in time in a lane of a timeline.

    Attributes:
        lane: name of the lane.
        name: name of the event.
        at: seconds from the start of the timeline.
        args: further facts.
    """

    lane: str
    name: str
    at: float
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Timeline:
    """Timeline of a collection.

    Attributes:
        spans: the spans of all lanes, in the order in which they were written.
        instants: the points in time of all lanes.
        counters: for each counter, pairs of the seconds from the start and the value.
        lanes: names of the lanes.
        info: facts about the timeline, such as ``"seconds"`` and ``"clocks"``; empty if the file
            was cut off.
        complete: False if the file was cut off, for example because the program was killed.
    """

    spans: list[Span] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    counters: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    lanes: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    complete: bool = False

    def __repr__(self) -> str:
        cut = "" if self.complete else ", cut off"
        return f"Timeline({len(self.spans)} spans in {len(self.lanes)} lanes{cut})"

    def lane(self, lane: str) -> list[Span]:
        """Returns the spans of a lane, in the order of their starts; enclosing spans come first."""
        own = [span for span in self.spans if span.lane == lane]
        return sorted(own, key=lambda span: (span.start, -span.seconds))

    def seconds(self, lane: str, name: str) -> float:
        """Returns the sum of the durations of all spans with a name in a lane."""
        own = (span for span in self.spans if (span.lane, span.name) == (lane, name))
        return sum(float(span.args.get("seconds", span.seconds)) for span in own)


def read_trace(path: str | os.PathLike[str]) -> Timeline:
    """Reads a timeline that a collector wrote.

    If the file was cut off, the timeline contains everything up to the last complete line.

    Args:
        path: path of the file.

    Raises:
        OSError: if the file can't be read.
        ValueError: if the file is not a timeline, or is damaged.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from trawl import Collector
        >>> from trawl.observe import read_trace
        >>> path = Path(tempfile.mkdtemp(), "run.json.gz")
        >>> options = {"frames_per_batch": 100, "total_frames": 300}
        >>> with Collector("Pendulum-v1", trace=path, **options) as collector:
        ...     for batch in collector:
        ...         pass
        >>> timeline = read_trace(path)
        >>> timeline.lanes
        ['learner', 'collector']
        >>> sorted({span.name for span in timeline.lane("collector")})
        ['batch', 'env', 'policy', 'wait']
    """
    file = Path(path)
    lines = read_lines(file)
    if next(lines, None) != HEAD:
        raise ValueError(f"{file} is not a timeline that Trawl wrote")
    made = _Reader()
    end: list[str] = []
    try:
        for event in events_of(_until_end(lines, end)):
            made.add(event)
        info = json.loads(end[0].removeprefix(TAIL).removesuffix("}")) if end else {}
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from error
    lanes = list(made.lanes.values())
    return Timeline(made.spans, made.instants, made.counters, lanes, info, bool(end))


def _until_end(lines: Iterator[str], end: list[str]) -> Iterator[str]:
    """Yields the lines of the events, and puts the line after them into ``end``."""
    for line in lines:
        if line.startswith(TAIL):
            end.append(line)
            return
        yield line


class _Reader:
    """Collects the events of a file."""

    def __init__(self) -> None:
        self.began = 0.0
        self.lanes: dict[tuple[int, int], str] = {}
        self.spans: list[Span] = []
        self.instants: list[Instant] = []
        self.counters: dict[str, list[tuple[float, float]]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        kind, name = event["ph"], str(event["name"])
        args = event.get("args", {})
        if kind == "M":
            if name == "thread_name":
                self.lanes[event["pid"], event["tid"]] = str(args["name"])
            elif name == "trawl_timeline":
                self.began = float(args["began"])
            return
        at = nanoseconds_of(event["ts"]) / 1e9 - self.began
        if kind == "C":
            self.counters.setdefault(name, []).append((at, float(args["value"])))
            return
        lane = self.lanes[event["pid"], event["tid"]]
        if kind == "X":
            seconds = nanoseconds_of(event["dur"]) / 1e9
            self.spans.append(Span(lane, name, at, seconds, args))
        elif kind == "i":
            self.instants.append(Instant(lane, name, at, args))
