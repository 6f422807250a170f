"""Draws the timeline of workers, whose clocks it aligns with the driver's.

Each worker has a lane, which receives requests, answers, deaths and replacements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from typing_extensions import override

from trawl.collectors.config import warn
from trawl.collectors.watch.tracer import DRIVER, SCHEDULER, BatchLane, Tracer
from trawl.collectors.workers.assembler import WorkerBatch
from trawl.collectors.workers.requests import BatchReady, CollectRequest, WorkerReady
from trawl.observe.timeline_file import TraceWriter, moved, rewrite
from trawl.observe.trace_options import TraceOptions
from trawl.observe.waits import Hold


class WorkerTracer(Tracer):
    """Draws the timeline of a collector with workers.

    Args:
        name: name of the argument that asked for the timeline, for error messages.
        options: file and detail of the timeline.
        remote: True if workers may be on other machines.
    """

    def __init__(self, name: str, options: TraceOptions, remote: bool) -> None:
        super().__init__(name, options)
        self._remote = remote
        self._lanes: dict[int, WorkerLane] = {}
        self.writer.name(DRIVER, SCHEDULER, "driver", "scheduler")

    def lane(self, index: int) -> WorkerLane:
        """Returns the lane of a worker."""
        if index not in self._lanes:
            self._lanes[index] = WorkerLane(self.writer, index, self._remote)
        return self._lanes[index]

    def delivered(self, parts: Sequence[WorkerBatch]) -> None:
        """Draws the delivery of workers' batches."""
        now = perf_counter()
        for part in parts:
            args = {"worker": part.index, "request": part.answer.number}
            self.writer.instant(
                DRIVER, SCHEDULER, "deliver", now, {**args, "frames": part.answer.frames}
            )

    @override
    def _finish(self, now: float) -> bool:
        lanes = list(self._lanes.values())
        for lane in lanes:
            lane.end()
        complete = self.writer.close(self._info(now, _clocks(lanes, used=True)))
        path = self.options.file
        if complete and is_moved(lanes) and path.is_file():
            try:
                rewrite(path, Shifts(lanes), self._info(now, _clocks(lanes, used=False)))
            except OSError as error:
                warn(
                    f"the lanes in {path} are aligned with the first messages only, because the "
                    f"file can't be rewritten: {error.strerror or error}",
                    RuntimeWarning,
                )
        return complete

    @property
    @override
    def _dropped(self) -> int:
        return sum(lane.dropped for lane in self._lanes.values())


def _clocks(lanes: Sequence[WorkerLane], used: bool) -> list[dict[str, Any]]:
    return [facts for lane in lanes for facts in lane.clock_facts(used)]


class WorkerLane(BatchLane):
    """Lane of a worker and its replacements.

    Args:
        writer: the timeline's file.
        index: number of the worker.
        remote: True if the worker may be on another machine.
    """

    def __init__(self, writer: TraceWriter, index: int, remote: bool) -> None:
        super().__init__(writer, index + 1, f"worker {index}")
        self.index = index
        self._new_clock = RemoteClock if remote else SharedClock
        # The clock of the worker, and of each one that it replaces.
        self.clocks: list[SharedClock] = [self._new_clock()]
        # Time at which each pending request was sent last.
        self._sent: dict[int, float] = {}
        # Why each of them was not sent earlier.
        self._held: dict[int, Hold] = {}
        self._died: float | None = None
        # A restart that is not drawn yet, because its end is known by the replacement's clock only:
        # times of the death, of the replacement's first message, and of its arrival.
        self._restart: tuple[float, float, float] | None = None

    def requested(self, request: CollectRequest) -> None:
        """Draws a request, which is being sent to the worker."""
        now = perf_counter()
        self._sent[request.number] = now
        args = {"worker": self.index, "request": request.number, "random": request.random}
        self.writer.instant(DRIVER, SCHEDULER, "request", now, args)

    def held(self, number: int, hold: Hold) -> None:
        """Notes why a request that was just sent was not sent earlier."""
        self._held[number] = hold

    def finished(self, answer: BatchReady) -> None:
        """Draws a batch, whose answer has just been read."""
        now, sent = perf_counter(), self._sent.pop(answer.number, None)
        held = self._held.pop(answer.number, None)
        times, clock = answer.times, self.clocks[-1]
        if times is None:
            return
        if sent is not None:
            clock.add_request(sent, times.received)
        clock.add_answer(times.ended, now)
        self._draw_restart(clock)
        args: dict[str, Any] = {"request": answer.number, "frames": answer.frames}
        if answer.version is not None:
            args["version"] = answer.version
        self.draw(times, args, answer.steps, _used(clock), held)

    def died(self) -> None:
        """Draws the death of the worker."""
        self._draw_restart(None)
        self._died = now = perf_counter()
        self.writer.instant(self.pid, 0, "died", now)

    def ready(self, ready: WorkerReady) -> None:
        """Notes the first message of a worker, with which the restart of a dead one ends."""
        if self._died is None:
            return
        self._restart = self._died, ready.at, perf_counter()
        self._died = None
        # The replacement may be on another machine.
        self.clocks.append(self._new_clock())

    def end(self) -> None:
        """Draws what is not drawn yet."""
        self._draw_restart(None)

    def _draw_restart(self, clock: SharedClock | None) -> None:
        """Draws a restart, whose end is that of its message if there is no clock."""
        if self._restart is None:
            return
        (died, ready, read), self._restart = self._restart, None
        ended = read if clock is None else ready - _used(clock)
        self.writer.span(self.pid, 0, "restart", died, ended)

    def clock_facts(self, used: bool) -> list[dict[str, Any]]:
        """Returns the offset of each clock, and the maximum error of the spans drawn with it.

        Args:
            used: True for the offset that was used while the timeline was written; False for the
                best one.
        """
        facts = []
        for number, clock in enumerate(self.clocks):
            offset = clock.used if used else clock.offset
            error = clock.error(offset)
            own = {"offset": offset, "error": error if math.isfinite(error) else None}
            facts.append({"lane": f"worker {self.index}", "restart": number, **own})
        return facts


class Shifts:
    """Moves the events of workers to the best estimates of their clocks.

    Args:
        lanes: lanes of the workers.
    """

    def __init__(self, lanes: Sequence[WorkerLane]) -> None:
        self._clocks = {lane.pid: iter(lane.clocks) for lane in lanes}
        self._shifts = {pid: _shift(next(clocks)) for pid, clocks in self._clocks.items()}

    def __call__(self, event: dict[str, Any]) -> None:
        """Moves an event; the events come in the order in which they were written."""
        pid, kind = event["pid"], event["ph"]
        if pid not in self._shifts or kind != "X":
            return
        if event["name"] == "restart":
            # The driver's clock tells when a restart began, and the replacement's when it ended.
            self._shifts[pid] = _shift(next(self._clocks[pid]))
            event["dur"] = moved(event["dur"], self._shifts[pid])
        else:
            event["ts"] = moved(event["ts"], self._shifts[pid])


def _used(clock: SharedClock) -> float:
    """Returns the offset with which a clock's spans are drawn.

    It is a number of whole nanoseconds, so that all times are rounded alike.
    """
    return round(clock.used, 9)


def _shift(clock: SharedClock) -> int:
    """Returns the nanoseconds by which events must be moved."""
    return round((_used(clock) - clock.offset) * 1e9)


def is_moved(lanes: Sequence[WorkerLane]) -> bool:
    """Returns True if the events of a worker have to be moved by a microsecond or more."""
    return any(abs(_shift(clock)) >= 1000 for lane in lanes for clock in lane.clocks)


class SharedClock:
    """Clock of a worker on this machine, which is the driver's own clock."""

    @property
    def offset(self) -> float:
        """Best estimate of the clock's offset from the driver's clock, in seconds."""
        return 0.0

    @property
    def used(self) -> float:
        """Estimate of the offset when it was first needed."""
        return 0.0

    def add_request(self, sent: float, received: float) -> None:
        """Ignores the times of a request."""

    def add_answer(self, sent: float, received: float) -> None:
        """Ignores the times of an answer."""

    def error(self, offset: float) -> float:
        """Returns 0: the clocks are the same."""
        return 0.0


class RemoteClock(SharedClock):
    """Clock of a worker on another machine, aligned as in the Network Time Protocol.

    A message arrives after it was sent. Each request is therefore an upper bound of the offset of
    the worker's clock from the driver's, and each answer a lower bound. The true offset lies
    between the tightest bounds of all messages, as long as both clocks run at the same rate.

    Attributes:
        low: lower bound of the offset, in seconds.
        high: upper bound of the offset.
        drift: seconds by which a message contradicted the bounds, because the clocks' rates differ.
    """

    def __init__(self) -> None:
        self.low, self.high = -math.inf, math.inf
        self.drift = 0.0
        self._used: float | None = None

    @override
    def add_request(self, sent: float, received: float) -> None:
        """Adds a message to the worker.

        Args:
            sent: time at which it was sent, by the driver's clock.
            received: time at which it arrived, by the worker's clock.
        """
        bound = received - sent
        if bound < self.low:
            self.drift = max(self.drift, self.low - bound)
        else:
            self.high = min(self.high, bound)

    @override
    def add_answer(self, sent: float, received: float) -> None:
        """Adds a message from the worker.

        Args:
            sent: a time before it was sent, by the worker's clock.
            received: time at which it arrived, by the driver's clock.
        """
        bound = sent - received
        if bound > self.high:
            self.drift = max(self.drift, bound - self.high)
        else:
            self.low = max(self.low, bound)

    @property
    @override
    def offset(self) -> float:
        """Middle between the bounds."""
        if math.isfinite(self.low) and math.isfinite(self.high):
            return self.low + (self.high - self.low) / 2
        return next((bound for bound in (self.low, self.high) if math.isfinite(bound)), 0.0)

    @property
    @override
    def used(self) -> float:
        """Estimate when it was first needed, which never changes again."""
        if self._used is None:
            self._used = self.offset
        return self._used

    @override
    def error(self, offset: float) -> float:
        """Returns the maximum error of an estimate, which is infinite without both bounds."""
        return max(self.high - offset, offset - self.low) + self.drift
