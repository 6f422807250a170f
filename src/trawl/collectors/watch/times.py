"""Times of batches, measured where they are collected, and the rates and shares that follow.

A thread has turns and pauses. In a worker, a turn is a batch, and a pause is idle time. In the
driver thread, a turn is a call that returns a batch, and a pause belongs to the learner. A worker
sends the times of each batch with it, so ``stats()`` queries no worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import add
from time import perf_counter
from typing import Any, NamedTuple

from trawl.observe.waits import DRIVER_PARTS, WORKER_PARTS
from trawl.rollout.times import LoopTimes

# Recent rates and shares cover the last batches: fewer than this number, and at most this number of
# seconds.
_BATCHES, _SECONDS = 256, 30.0


class BatchTimes(NamedTuple):
    """Times of a batch, where it was collected.

    Points in time are values of ``time.perf_counter()`` in that process.

    Attributes:
        received: time at which the request for the batch arrived.
        began: time at which work on the batch began.
        loop_began: time at which the first step began.
        loop_ended: time at which the last step ended.
        ended: time at which the batch was finished.
        env: seconds in the environment.
        policy: seconds in the policy.
        weights: seconds in which new weights were loaded.
        idle: seconds without work before the batch.
    """

    received: float
    began: float
    loop_began: float
    loop_ended: float
    ended: float
    env: float
    policy: float
    weights: float
    idle: float

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each of the ``WORKER_PARTS``."""
        used = self.env + self.policy + self.weights
        overhead = max(0.0, self.ended - self.began - used)
        return (self.env, self.policy, overhead, self.weights, self.idle)


class TurnClock:
    """Clock of a thread that takes turns between collecting and other work.

    Attributes:
        received: time at which the current turn was asked for.
        began: time at which the current turn began.
        ended: time at which the last turn ended.
        paused: seconds between the last turn and the current one.
    """

    def __init__(self) -> None:
        self.received = self.began = self.ended = self.paused = 0.0
        self._first = True
        self._env = self._policy = self._weights = 0.0

    def begin(self, received: float | None = None) -> None:
        """Begins a turn, which was asked for at the time ``received``."""
        self.began = now = perf_counter()
        self.received = now if received is None else received
        # Time before the first turn counts for nobody.
        self.paused = 0.0 if self._first else now - self.ended
        self._first = False

    def end(self) -> None:
        """Ends a turn."""
        self.ended = perf_counter()

    def batch_times(self, loop: LoopTimes) -> BatchTimes:
        """Returns the times of the turn that has just ended.

        Args:
            loop: the times of the inner loop since it was made.
        """
        env, policy, weights = (
            loop.env - self._env,
            loop.policy - self._policy,
            loop.weights - self._weights,
        )
        self._env, self._policy, self._weights = loop.env, loop.policy, loop.weights
        return BatchTimes(
            self.received,
            self.began,
            max(loop.began, self.began),
            max(loop.ended, self.began),
            self.ended,
            env,
            policy,
            weights,
            self.paused,
        )


class RunningTotals:
    """Sums that grow with each batch, and their growth over recent batches.

    Args:
        size: number of sums.
    """

    def __init__(self, size: int) -> None:
        self.totals = (0.0,) * size
        # Times with the sums at these times. The first one is before the first recent batch.
        self._marks: deque[tuple[float, tuple[float, ...]]] = deque()
        self._first: float | None = None

    def add(self, began: float, ended: float, amounts: Iterable[float]) -> None:
        """Adds the amounts of a batch, which was collected between two points in time."""
        marks = self._marks
        if not marks:
            self._first = began
            marks.append((began, self.totals))
        self.totals = tuple(map(add, self.totals, amounts))
        marks.append((ended, self.totals))
        # The newest batch always counts.
        while len(marks) > _BATCHES or (len(marks) > 2 and marks[1][0] < ended - _SECONDS):
            marks.popleft()

    @property
    def recent(self) -> tuple[float, tuple[float, ...]]:
        """Seconds that recent batches took, and the growth of each sum in these seconds."""
        marks = self._marks
        if not marks:
            return 0.0, self.totals
        (began, before), (ended, after) = marks[0], marks[-1]
        return ended - began, tuple(b - a for a, b in zip(before, after, strict=True))

    @property
    def seconds(self) -> float:
        """Seconds from the first batch to the last one."""
        return 0.0 if self._first is None else self._marks[-1][0] - self._first


class WorkerTimes:
    """Rates and shares of time of one worker, or of a collector without workers."""

    def __init__(self) -> None:
        self._sums = RunningTotals(2 + len(WORKER_PARTS))

    def add(self, times: BatchTimes, frames: int) -> None:
        """Adds a batch.

        Args:
            times: the times of the batch.
            frames: number of frames in the batch.
        """
        self._sums.add(times.began - times.idle, times.ended, (1, frames, *times.seconds))

    def stats(self) -> dict[str, Any]:
        """Returns the worker's rates and shares; an empty dict before the first batch."""
        recent, totals = self.recent, self.totals
        if not totals[0]:
            return {}
        rates = _rates(recent[1], sum(recent[2:]), totals[1], sum(totals[2:]))
        return rates | shares_of([self])

    @property
    def recent(self) -> tuple[float, ...]:
        """Number of recent batches, their frames, and the seconds of each part of the time."""
        return self._sums.recent[1]

    @property
    def totals(self) -> tuple[float, ...]:
        """Number of all batches, their frames, and the seconds of each part of the time."""
        return self._sums.totals


def shares_of(workers: Sequence[WorkerTimes]) -> dict[str, Any]:
    """Returns how several workers divide their time; an empty dict if there is no batch.

    The keys are ``env_share`` and so on for the shares of recent time, and ``env_seconds`` and so
    on for all the time since the first batch.
    """
    started = [one for one in workers if one.totals[0]]
    if not started:
        return {}
    recent = [sum(column) for column in zip(*(one.recent for one in started), strict=True)]
    totals = [sum(column) for column in zip(*(one.totals for one in started), strict=True)]
    return _divided(WORKER_PARTS, recent[2:], totals[2:])


def _rates(frames: float, seconds: float, all_frames: float, all_seconds: float) -> dict[str, Any]:
    return {
        "frames_per_second": _ratio(frames, seconds),
        "frames_per_second_overall": _ratio(all_frames, all_seconds),
    }


def _divided(
    parts: Iterable[str], recent: Sequence[float], totals: Sequence[float]
) -> dict[str, Any]:
    whole = sum(recent)
    shares = {f"{part}_share": _ratio(own, whole) for part, own in zip(parts, recent, strict=True)}
    return shares | {f"{part}_seconds": own for part, own in zip(parts, totals, strict=True)}


def _ratio(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0


class DriverTimes:
    """Rates and shares of time of the driver thread, which takes batches from a collector."""

    def __init__(self) -> None:
        self._sums = RunningTotals(1 + len(DRIVER_PARTS))

    def add(self, clock: TurnClock, frames: int, waited: float) -> None:
        """Adds a turn of the collector.

        Args:
            clock: clock of the turn that has just ended.
            frames: number of frames that were counted in the turn.
            waited: seconds of the turn in which the thread waited for frames.
        """
        used = clock.ended - clock.began
        waited = min(waited, used)
        amounts = (frames, clock.paused, waited, used - waited)
        self._sums.add(clock.began - clock.paused, clock.ended, amounts)

    def stats(self) -> dict[str, Any]:
        """Returns the rates and shares; an empty dict before the first batch."""
        seconds, recent = self._sums.recent
        totals = self._sums.totals
        if not seconds:
            return {}
        facts = _rates(recent[0], seconds, totals[0], self._sums.seconds)
        return facts | _divided(DRIVER_PARTS, recent[1:], totals[1:])
