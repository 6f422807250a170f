"""Draws the timeline of a collector, from the times that it measures anyway.

A tracer gets the turns of the driver thread from its clock, the times of waiting from the
scheduler, and those of updates from a context around each. Only the times of single steps are
recorded just for a timeline. Workers have lanes of their own (``workers/tracer.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

from typing_extensions import override

from trawl.collectors.config import warn
from trawl.collectors.watch.times import BatchTimes, TurnClock
from trawl.observe.timeline_file import TraceWriter
from trawl.observe.trace_options import TraceOptions
from trawl.observe.waits import Hold
from trawl.rollout.times import StepSamples

#: Process and thread of the driver's lanes.
DRIVER, LEARNER, SCHEDULER = 0, 0, 1
# Seconds by which a span may be too long for its place, because times were rounded.
_ROUNDED = 1e-7
# Seconds between two values of the counters.
_COUNTERS = 0.1


class Piece(NamedTuple):
    """Span of a batch.

    Attributes:
        name: name of the activity.
        began: time at which the span begins.
        ended: time at which the span ends.
        seconds: duration of the activity, if there is no room for it; None if there is.
    """

    name: str
    began: float
    ended: float
    seconds: float | None = None


class Pieces:
    """Divides batches into spans of whole nanoseconds, whose sums are those of the true times."""

    def __init__(self) -> None:
        # For each name, the seconds that were rounded off so far.
        self._rests = {"policy": 0.0, "env": 0.0}

    def of(self, times: BatchTimes) -> Iterator[Piece]:
        """Yields the spans inside a batch, one after the other.

        Steps of the environment and calls of the policy alternate. The spans have the sums of
        their times.
        """
        cursor, limit = times.began, times.ended
        if times.weights:
            cursor += times.weights
            yield Piece("weights", times.began, cursor)
        used = times.policy + times.env
        if cursor <= times.loop_began and used <= times.loop_ended - times.loop_began + _ROUNDED:
            cursor, limit = times.loop_began, times.loop_ended
        for name, seconds in (("policy", times.policy), ("env", times.env)):
            if not seconds:
                continue
            room = max(0.0, limit - cursor)
            if seconds > room + _ROUNDED:
                # Workers with workers of their own have collected for longer than the batch took.
                yield Piece(name, cursor, limit, seconds)
                cursor = limit
                continue
            wanted = seconds + self._rests[name]
            drawn = min(room, max(0.0, round(wanted, 9)))
            self._rests[name] = wanted - drawn
            yield Piece(name, cursor, cursor + drawn)
            cursor += drawn


class BatchLane:
    """Lane of a timeline for the batches of a worker, or of a collector without workers.

    Args:
        writer: the timeline's file.
        pid: number of the lane.
        name: name of the lane.

    Attributes:
        dropped: number of steps that were recorded and then dropped, because there were too many.
    """

    def __init__(self, writer: TraceWriter, pid: int, name: str) -> None:
        self.writer, self.pid = writer, pid
        self.dropped = 0
        self._name = name
        self._has_steps = False
        self._pieces = Pieces()
        writer.name(pid, 0, name, name)

    def draw(
        self,
        times: BatchTimes,
        args: Mapping[str, Any],
        steps: StepSamples | None,
        offset: float,
        held: Hold | None = None,
    ) -> None:
        """Draws a batch.

        Args:
            times: times of the batch.
            args: facts about the batch.
            steps: times of single steps; None if they were not recorded.
            offset: seconds by which the clock of ``times`` and ``steps`` is ahead of the driver's.
            held: why the batch was not requested earlier, if it is known.
        """
        span, began = self.writer.span, times.began - offset
        if times.idle:
            reason = None if held is None else {"reason": held.label}
            span(self.pid, 0, "wait", began - times.idle, began, reason)
        span(self.pid, 0, "batch", began, times.ended - offset, args)
        for piece in self._pieces.of(times):
            own = None if piece.seconds is None else {"seconds": piece.seconds}
            span(self.pid, 0, piece.name, piece.began - offset, piece.ended - offset, own)
        if steps is not None:
            self._draw_steps(steps, offset)

    def _draw_steps(self, steps: StepSamples, offset: float) -> None:
        if not self._has_steps and steps.times:
            self._has_steps = True
            self.writer.name(self.pid, 1, self._name, f"{self._name} steps")
        self.dropped += steps.dropped
        for began, between, ended in steps.times:
            self.writer.span(self.pid, 1, "act", began - offset, between - offset)
            self.writer.span(self.pid, 1, "step", between - offset, ended - offset)


class Tracer:
    """Draws the activities of the driver thread, which takes batches from a collector.

    Args:
        name: name of the argument that asked for the timeline, for error messages.
        options: file and detail of the timeline.

    Attributes:
        options: file and detail of the timeline.

    Raises:
        OSError: if the file can't be written.
    """

    def __init__(self, name: str, options: TraceOptions) -> None:
        self.options = options
        try:
            self.writer = TraceWriter(options.file, self._warn)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{name} can't be written to {str(options.file)!r}: {error.strerror}. Pass the "
                "path of a file in a folder that exists and that you may write to",
            ) from error
        self._began = perf_counter()
        self._date = datetime.now(timezone.utc)
        self.writer.begin(self._began)
        self.writer.name(DRIVER, LEARNER, "driver", "learner")
        # Threads that update weights while another one takes batches, each with its lane.
        self._threads: dict[int, int] = {}
        self._numbers = count(1)
        self._taker: int | None = None
        self._frames = 0
        self._counted: float | None = None

    @property
    def samples_steps(self) -> bool:
        """True if single steps are drawn."""
        return self.options.detail == "step"

    def _warn(self, error: OSError) -> None:
        warn(
            f"the timeline {self.options.file} ends here, because it can't be written: "
            f"{error.strerror or error}. Collection goes on",
            RuntimeWarning,
        )

    # --- turns

    def begin_turn(self) -> None:
        """Notes the thread that begins to take a batch."""
        self._taker = threading.get_ident()

    def end_turn(
        self, clock: TurnClock, frames: int, counters: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Draws a turn of the collector.

        Args:
            clock: clock of the turn that has just ended.
            frames: number of frames that were counted in the turn.
            counters: function that returns the values of the counters.
        """
        ended = clock.ended
        if clock.paused:
            self.writer.span(DRIVER, LEARNER, "learn", clock.began - clock.paused, clock.began)
        self.writer.span(DRIVER, LEARNER, "collect", clock.began, ended, {"frames": frames})
        self._frames += frames
        before = clock.began if self._counted is None else self._counted
        if self._counted is None or ended - before >= _COUNTERS:
            self._rate(before, ended)
            self._count(ended, counters())

    def _rate(self, before: float, now: float) -> None:
        if now > before:
            self.writer.counter("frames/s", now, self._frames / (now - before))
        self._frames, self._counted = 0, now

    def _count(self, now: float, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.writer.counter(name, now, value)

    def waited(self, began: float, ended: float) -> None:
        """Draws a time in which the thread waited for frames."""
        self.writer.span(DRIVER, LEARNER, "wait", began, ended)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Draws the time of a ``with`` block, in which weights are updated."""
        began = perf_counter()
        try:
            yield
        finally:
            # Read first: a turn that begins while the lane is chosen is later than the update.
            ended = perf_counter()
            self.writer.span(DRIVER, self._lane_of_thread(), "update", began, ended)

    def _lane_of_thread(self) -> int:
        """Returns the lane for updates by this thread."""
        own = threading.get_ident()
        if self._taker in (None, own):
            return LEARNER
        # Another thread takes batches, so the update may overlap a batch.
        if own not in self._threads:
            # Threads that come at the same moment get different numbers.
            number = next(self._numbers)
            self._threads[own] = lane = SCHEDULER + number
            name = "updates" if number == 1 else f"updates {number}"
            self.writer.name(DRIVER, lane, "driver", name)
        return self._threads[own]

    # --- the end

    def close(self, counters: Mapping[str, Any]) -> None:
        """Ends the timeline, and closes its file.

        Args:
            counters: values of the counters.
        """
        now = perf_counter()
        # The rate over a very short time would say nothing.
        if self._counted is not None and now - self._counted >= _COUNTERS:
            self._rate(self._counted, now)
        self._count(now, counters)
        self._finish(now)

    def _finish(self, now: float) -> bool:
        return self.writer.close(self._info(now, []))

    def _info(self, now: float, clocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "date": self._date.isoformat(timespec="seconds"),
            "seconds": now - self._began,
            "detail": self.options.detail,
            "clocks": list(clocks),
            "steps_dropped": self._dropped,
        }

    @property
    def _dropped(self) -> int:
        """Number of steps that were recorded and then dropped."""
        return 0


class LocalTracer(Tracer):
    """Draws the timeline of a collector without workers."""

    def __init__(self, name: str, options: TraceOptions) -> None:
        super().__init__(name, options)
        self._lane = BatchLane(self.writer, 1, "collector")

    @override
    def end_turn(
        self, clock: TurnClock, frames: int, counters: Callable[[], Mapping[str, Any]]
    ) -> None:
        super().end_turn(clock, frames, counters)
        # The thread collects the batch itself.
        self.waited(clock.began, clock.ended)

    def batch(self, times: BatchTimes, frames: int, steps: StepSamples | None) -> None:
        """Draws a batch.

        Args:
            times: times of the batch.
            frames: number of frames in the batch.
            steps: times of single steps; None if they were not recorded.
        """
        self._lane.draw(times, {"frames": frames}, steps, 0.0)

    @property
    @override
    def _dropped(self) -> int:
        return self._lane.dropped
