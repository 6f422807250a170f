"""Lanes of a timeline in which workers draw their batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from typing_extensions import override

from trawl.collectors.watch.times import BatchTimes
from trawl.collectors.workers.requests import BatchReady, CollectRequest, WorkerReady
from trawl.observe.timeline_file import TraceWriter, moved
from trawl.observe.waits import Hold
from trawl.rollout.times import StepSamples

#: Process and thread of the driver's lanes.
DRIVER, LEARNER, SCHEDULER = 0, 0, 1
# Seconds by which a span may be too long for its place, because times were rounded.
_ROUNDED = 1e-7


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
