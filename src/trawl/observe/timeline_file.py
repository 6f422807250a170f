"""Writes timelines as files of Chrome's trace format, which Perfetto reads as well.

A file is one JSON object. Each event has a line of its own, and compressed files are flushed every
second or so. A reader can therefore use a file that was cut off, up to its last complete line.
"""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

#: Beginning of each file.
HEAD = '{"displayTimeUnit":"ms","traceEvents":['
#: Beginning of the line after the events.
TAIL = '],"otherData":'
# Events are written when there are this many of them, or after this number of seconds.
_EVENTS, _SECONDS = 512, 1.0
# Fast: a timeline repeats itself so much that a higher level gains little.
_LEVEL = 1
_GZIP = 31
_CHUNK = 1 << 16

Args = Mapping[str, Any] | None

# Readers convert times to whole nanoseconds, and some drop spans that then overlap. A quarter of a
# nanosecond more keeps a time from being the next lower one, whether they round or cut it.
_QUARTER = 0.25


def _microseconds(nanoseconds: int) -> str:
    nanoseconds = max(0, nanoseconds)
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}25"


def nanoseconds_of(microseconds: float) -> int:
    """Returns a time of an event in nanoseconds."""
    return math.floor(microseconds * 1000)


def moved(microseconds: float, nanoseconds: int) -> float:
    """Returns a time of an event that is later by some nanoseconds; never a negative one."""
    return (max(0, nanoseconds_of(microseconds) + nanoseconds) + _QUARTER) / 1000


class TraceFile:
    """File to which lines are appended, compressed if its name ends with ``.gz``.

    Args:
        path: path of the file, which is replaced if it exists.

    Raises:
        OSError: if the file can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115
        gz = path.suffix == ".gz"
        self._compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP) if gz else None

    def write(self, text: str) -> None:
        """Writes text, so that a reader finds it even if this process dies."""
        data = text.encode()
        if self._compressor is not None:
            data = self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        self._write(data)

    def _write(self, data: bytes) -> None:
        # An unbuffered file may write less than it is given.
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def close(self, whole: bool = True) -> None:
        """Closes the file.

        Args:
            whole: False if the end of the compressed data can't be written.
        """
        try:
            if whole and self._compressor is not None:
                self._write(self._compressor.flush())
        finally:
            self._file.close()


def read_lines(path: Path) -> Iterator[str]:
    """Yields the complete lines of a file, which may be cut off.

    Raises:
        OSError: if the file can't be read.
        ValueError: if the file is damaged elsewhere than at its end.
    """
    with open(path, "rb") as file:
        start = file.read(2)
        file.seek(0)
        inflate = zlib.decompressobj(_GZIP) if start == b"\x1f\x8b" else None
        rest = b""
        while chunk := file.read(_CHUNK):
            try:
                *lines, rest = (rest + (inflate.decompress(chunk) if inflate else chunk)).split(
                    b"\n"
                )
                yield from (line.decode() for line in lines)
            except (zlib.error, UnicodeDecodeError) as error:
                raise ValueError(f"{path} is damaged: {error}") from error


class TraceWriter:
    """Writes the events of a timeline. Any thread may call it, and signal handlers, too.

    Times are seconds of this process's ``time.perf_counter()``.

    Args:
        path: path of the file, which is replaced if it exists.
        report: function that is called with the error if a later write fails. Nothing more is
            written then.

    Attributes:
        open: False once the file is closed, or can't be written any more.

    Raises:
        OSError: if the file can't be written.
    """

    def __init__(self, path: Path, report: Callable[[OSError], None]) -> None:
        self.path = path
        self._report = report
        # A signal handler that closes the collector may interrupt a write of its own thread.
        self._lock = threading.RLock()
        self._writing = False
        self._end: str | None = None
        self._owner = os.getpid()
        self._lines: list[str] = []
        self._due = monotonic() + _SECONDS
        self._between = ""
        self._file = TraceFile(path)
        self.open = True
        try:
            self._file.write(f"{HEAD}\n")
        except OSError:
            self._give_up()
            raise

    # --- events

    def name(self, pid: int, tid: int, process: str, thread: str) -> None:
        """Names a lane, and the process that it belongs to."""
        self._name("process_name", pid, tid, {"name": process})
        self._name("process_sort_index", pid, tid, {"sort_index": pid})
        self._name("thread_name", pid, tid, {"name": thread})
        self._name("thread_sort_index", pid, tid, {"sort_index": tid})

    def begin(self, began: float) -> None:
        """Notes the time at which the timeline begins."""
        self._name("trawl_timeline", 0, 0, {"began": began})

    def _name(self, kind: str, pid: int, tid: int, args: Mapping[str, Any]) -> None:
        self._add(f'{{"ph":"M","name":"{kind}","pid":{pid},"tid":{tid},"args":{json.dumps(args)}}}')

    def span(
        self, pid: int, tid: int, name: str, began: float, ended: float, args: Args = None
    ) -> None:
        """Adds a span of time."""
        own = f',"args":{json.dumps(args)}' if args else ""
        start = round(began * 1e9)
        self._add(
            f'{{"ph":"X","name":"{name}","pid":{pid},"tid":{tid},"ts":{_microseconds(start)},'
            f'"dur":{_microseconds(round(ended * 1e9) - start)}{own}}}'
        )

    def instant(self, pid: int, tid: int, name: str, at: float, args: Args = None) -> None:
        """Adds a point in time."""
        own = f',"args":{json.dumps(args)}' if args else ""
        self._add(
            f'{{"ph":"i","s":"t","name":"{name}","pid":{pid},"tid":{tid},'
            f'"ts":{_microseconds(round(at * 1e9))}{own}}}'
        )

    def counter(self, name: str, at: float, value: float) -> None:
        """Adds a value of a counter."""
        self._add(
            f'{{"ph":"C","name":"{name}","pid":0,"tid":0,"ts":{_microseconds(round(at * 1e9))},'
            f'"args":{{"value":{json.dumps(value)}}}}}'
        )

    def _add(self, line: str) -> None:
        if self._is_copy:
            return
        with self._lock:
            if not self.open:
                return
            self._lines.append(line)
            if self._writing or (len(self._lines) < _EVENTS and monotonic() < self._due):
                return
            failed = self._flush()
        if failed is not None:
            self._report(failed)

    def _flush(self) -> OSError | None:
        """Writes the events that wait, and the end if it is due; returns the error of a write."""
        if not self.open:
            return None
        self._writing = True
        try:
            while self._lines:
                lines, self._lines = self._lines, []
                between, self._between = self._between, ",\n"
                self._due = monotonic() + _SECONDS
                self._file.write(between + ",\n".join(lines))
            if self._end is not None:
                self._file.write(self._end)
                self._file.close()
                self.open = False
        except OSError as error:
            self._give_up()
            return error
        except BaseException:
            # After Ctrl-C in the middle of a write, the rest would not fit to what was written.
            self._give_up()
            raise
        finally:
            self._writing = False
        return None

    @property
    def _is_copy(self) -> bool:
        """True in a process that was forked from the process that the file belongs to."""
        return os.getpid() != self._owner

    def _give_up(self) -> None:
        self.open = False
        with suppress(OSError):
            self._file.close(whole=False)

    # --- the end

    def close(self, info: Mapping[str, Any]) -> bool:
        """Writes the events that wait and the file's end, and closes the file.

        Args:
            info: facts about the timeline, for ``otherData``.

        Returns:
            True if the file is complete. False if it can't be written any more, or if the caller
            is a signal handler that has interrupted a write, which then completes the file.
        """
        if self._is_copy:
            return False
        with self._lock:
            if not self.open or self._end is not None:
                return False
            self._end = f"\n{TAIL}{json.dumps(info)}}}\n"
            if self._writing:
                # The write that a signal handler has interrupted ends the file.
                return False
            failed = self._flush()
            self.open = False
        if failed is not None:
            self._report(failed)
        return failed is None


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], info: Mapping[str, Any]) -> None:
    """Changes the events of a complete file.

    Args:
        path: path of the file, which is replaced only when all is written.
        change: function that is called with each event, in order, and may change it.
        info: facts about the timeline, for ``otherData``.

    Raises:
        OSError: if the new file can't be written; the old one is left as it is.
    """
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    made = TraceFile(part)
    try:
        for text in _changed(path, change):
            made.write(text)
        made.write(f"\n{TAIL}{json.dumps(info)}}}\n")
        made.close()
        os.replace(part, path)
    except BaseException:
        made.close(whole=False)
        part.unlink(missing_ok=True)
        raise


def _changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Iterator[str]:
    """Yields the text of a file up to the end of its events, in large parts."""
    lines = [f"{HEAD}\n"]
    between = ""
    for event in events_of(read_lines(path)):
        change(event)
        lines.append(between + json.dumps(event, separators=(",", ":")))
        between = ",\n"
        if len(lines) >= _EVENTS:
            yield "".join(lines)
            lines = []
    yield "".join(lines)


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yields the events in the lines of a file, up to the line after the events.

    Raises:
        ValueError: if a line is not JSON.
        TypeError: if a line is not an object.
    """
    for line in lines:
        if line.startswith(TAIL):
            return
        if line == HEAD:
            continue
        event = json.loads(line.removesuffix(","))
        if not isinstance(event, dict):
            raise TypeError(f"an event must be an object, but there is {line[:50]!r}")
        yield event
