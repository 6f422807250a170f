"""Reading of trace files: JSON in the format of Chrome's traces, gzipped or not.

Events are read one by one, so a trace may be large. A trace may be cut off, or damaged: the events
before the damage are kept.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from array import array
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from trawl.data.sinks.files import is_inside, open_inside
from trawl.data.sinks.record import Record
from trawl.extras.cli.errors import message_of, print_note, shown
from trawl.extras.report.markup import is_number

# Names of spans that are drawn in their own way; all others are drawn as "other".
SPANS = (
    *("batch", "env", "policy", "weights", "wait", "restart"),
    *("collect", "learn", "update", "request", "deliver", "died", "other"),
)
# Limits for traces from strangers: number of characters, and of characters of one event; numbers
# of lanes and counters; and the latest time.
_MOST_CHARS, _LONGEST_EVENT = 1 << 30, 1 << 20
MOST_LANES, MOST_COUNTERS = 256, 32
_LATEST = 2.0**53
# Number of bytes to read at a time: what comes before damage within them is lost.
_READ = 1 << 12
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[|\A\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
# The wbits with which zlib reads gzipped files.
_GZIP = 31
# File that is read if the record names none.
_TRACE = "trace.json.gz"
_CUT = "the file ends too early"
_NUMBER = {name: number for number, name in enumerate(SPANS)}
# Single steps have a lane of their own, with these names.
_NUMBER |= {"act": _NUMBER["policy"], "step": _NUMBER["env"]}
_DRIVER = 0

_Lane = tuple[int, int]


class _Damage(Exception):
    """Reason why the rest of a trace can't be read."""


@dataclass
class Spans:
    """Spans of one thread; times are in microseconds.

    Attributes:
        starts: times at which spans begin.
        lengths: their lengths; 0 for an instant.
        names: indices of their names in :data:`SPANS`.
    """

    starts: array[float] = field(default_factory=lambda: array("d"))
    lengths: array[float] = field(default_factory=lambda: array("d"))
    names: array[int] = field(default_factory=lambda: array("b"))


@dataclass
class Series:
    """Values of a counter over time.

    Attributes:
        times: times in microseconds.
        values: value from each time on.
    """

    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class Trace:
    """Content of a trace file.

    Attributes:
        lanes: spans of each thread, by process and thread.
        counters: values of each counter, by its name.
        damage: reason why the trace is not complete; an empty string for a complete one.
        left_out: number of events that are not drawn, because there are too many threads.
    """

    lanes: dict[_Lane, Spans] = field(default_factory=dict)
    counters: dict[str, Series] = field(default_factory=dict)
    damage: str = ""
    left_out: int = 0
    _names: dict[tuple[str, _Lane], str] = field(default_factory=dict)
    _order: dict[int, float] = field(default_factory=dict)

    def label(self, lane: _Lane) -> str:
        """Returns the name of a lane: that of its process, or of its thread."""
        pid, tid = lane
        process = self._names.get(("process_name", (pid, 0)), f"process {pid}")
        thread = self._names.get(("thread_name", lane), "" if pid else f"thread {tid}")
        alone = sum(other == pid for other, _ in self.lanes) == 1
        if pid == _DRIVER:
            return thread
        if alone or not thread:
            return process
        return thread if thread.startswith(process) else f"{process}, {thread}"

    def sorted_lanes(self) -> list[_Lane]:
        """Returns the lanes in the order in which they are drawn: the driver's come first."""
        return sorted(self.lanes, key=lambda lane: (self._order.get(lane[0], lane[0]), lane))

    def add(self, event: Any) -> None:
        """Adds an event; an event of an unknown form is ignored."""
        if not isinstance(event, dict):
            return
        phase, time, name = event.get("ph"), event.get("ts"), event.get("name")
        pid, tid = _index(event.get("pid")), _index(event.get("tid"))
        if not isinstance(name, str):
            return
        if phase == "M":
            self._name(name, (pid, tid), event.get("args"))
        elif not is_number(time) or abs(time) > _LATEST:
            return
        elif phase in ("X", "i", "I"):
            length = event.get("dur", 0.0) if phase == "X" else 0.0
            if is_number(length) and 0 <= length <= _LATEST:
                self._span((pid, tid), float(time), float(length), name)
        elif phase == "C":
            self._count(name, float(time), event.get("args"))

    def _name(self, kind: str, lane: _Lane, args: Any) -> None:
        args = args if isinstance(args, dict) else {}
        most = 4 * MOST_LANES
        if kind == "process_sort_index" and is_number(args.get("sort_index")):
            if len(self._order) < most:
                self._order[lane[0]] = args["sort_index"]
        elif isinstance(args.get("name"), str) and len(self._names) < most:
            place = lane if kind == "thread_name" else (lane[0], 0)
            self._names[kind, place] = shown(args["name"])

    def _span(self, lane: _Lane, time: float, length: float, name: str) -> None:
        spans = self.lanes.get(lane)
        if spans is None:
            if len(self.lanes) >= MOST_LANES:
                self.left_out += 1
                return
            spans = self.lanes[lane] = Spans()
        spans.starts.append(time)
        spans.lengths.append(length)
        spans.names.append(_NUMBER.get(name, _NUMBER["other"]))

    def _count(self, name: str, time: float, args: Any) -> None:
        found = args if isinstance(args, dict) else {}
        for key, value in found.items():
            label = shown(name if len(found) == 1 else f"{name}: {key}")
            if label not in self.counters and len(self.counters) >= MOST_COUNTERS:
                self.left_out += 1
            elif is_number(value):
                series = self.counters.setdefault(label, Series())
                series.times.append(time)
                series.values.append(float(value))


def find_trace(record: Record) -> tuple[Trace | None, str]:
    """Returns the trace of a dataset, and a sentence that says what it lacks.

    A damaged trace is no error: a note on stderr reports it.

    Args:
        record: record of the dataset.

    Returns:
        The trace, or None if there is none; and the sentence, which is empty for a whole trace.
    """
    named = record.given.get("trace")
    directory, name = _place(record.directory, named)
    try:
        trace = load_trace(directory, name)
    except FileNotFoundError:
        if named is None:
            return None, "No trace was recorded: trawl collect --trace records one."
        return None, _noted(record, f"the trace {shown(named)} is missing")
    except (OSError, ValueError) as error:
        return None, _noted(record, f"the trace can't be read: {message_of(error)}")
    if not trace.damage:
        return trace, ""
    place = name if directory == record.directory else named
    return trace, _noted(record, f"the trace {shown(place)} is damaged: {shown(trace.damage)}")


def _place(dataset: Path, named: Any) -> tuple[Path, str]:
    """Returns the folder and the name of a trace.

    Args:
        dataset: path of the dataset.
        named: path of the trace in the record, not yet checked. ``trawl collect`` records an
            absolute path; a relative one is a path within the dataset.
    """
    if not isinstance(named, str) or "\0" in named:
        return dataset, _TRACE
    if os.path.isabs(named):
        # Only links within a dataset are refused: this path may lead anywhere anyway.
        path = Path(os.path.realpath(named))
        return path.parent, path.name
    return dataset, named if is_inside(named) else _TRACE


def _noted(record: Record, what: str) -> str:
    """Prints a note on what a trace lacks, and returns it as a sentence."""
    print_note(f"note: {record.directory}: {what}")
    return f"{what[0].upper()}{what[1:]}."


def load_trace(directory: Path, name: str) -> Trace:
    """Reads a trace file.

    Args:
        directory: path of the folder in which the file is.
        name: name of the file.

    Raises:
        OSError: if the file can't be opened.
        ValueError: if the file is not a regular file, or its path contains a link.
    """
    trace = Trace()
    with open(open_inside(directory, name), "rb") as file:
        try:
            for event in _events(_texts(file)):
                trace.add(event)
        except _Damage as damage:
            trace.damage = str(damage)
        except (OSError, ValueError, zlib.error, RecursionError) as error:
            trace.damage = str(error) or type(error).__name__
    return trace


def _texts(file: BinaryIO) -> Iterator[str]:
    """Yields the text of a file in pieces, none of them empty."""
    decoder = getincrementaldecoder("utf-8")("replace")
    for piece in _unzipped(file):
        if text := decoder.decode(piece):
            yield text


def _unzipped(file: BinaryIO) -> Iterator[bytes]:
    zipped = file.read(2) == b"\x1f\x8b"
    file.seek(0, os.SEEK_SET)
    inflater = zlib.decompressobj(_GZIP)
    while piece := file.read(_READ):
        yield inflater.decompress(piece) if zipped else piece
        # Several gzipped files, one after the other, are one file.
        while inflater.unused_data:
            rest, inflater = inflater.unused_data, zlib.decompressobj(_GZIP)
            yield inflater.decompress(rest)


def _events(texts: Iterator[str]) -> Iterator[Any]:
    """Yields the events of a trace.

    Args:
        texts: the trace, in pieces.

    Raises:
        _Damage: if the text is not JSON, or too long.
    """
    decoder = json.JSONDecoder()
    # Characters that are not decoded yet, and the place of the next event among them.
    waiting, place, read, begun = "", 0, 0, False
    for more in chain(texts, [""]):
        read += len(more)
        waiting, place = waiting[place:] + more, 0
        if not begun and (start := _EVENTS.search(waiting)):
            begun, place = True, start.end()
        if not begun and (not more or read > _LONGEST_EVENT):
            raise _Damage("it is not a trace, as it has no traceEvents")
        while begun:
            place = _BETWEEN.match(waiting, place).end()  # type: ignore[union-attr]
            if waiting[place : place + 1] == "]":
                return
            try:
                event, place = decoder.raw_decode(waiting, place)
            except json.JSONDecodeError as error:
                if more and len(waiting) - place <= _LONGEST_EVENT:
                    break
                raise _Damage(error.msg if more else _CUT) from None
            yield event
        if read > _MOST_CHARS:
            raise _Damage(f"only the first {_MOST_CHARS:,} characters are read")


def _index(value: Any) -> int:
    """Returns the number of a process or thread; texts and missing numbers are 0."""
    return value if type(value) is int and abs(value) < _LATEST else 0
