"""Draws the timeline of a collector, from the times that it measures anyway.

A tracer gets the turns of the driver thread from its clock, the times of waiting from the
scheduler, and those of updates from a context around each. Each worker has a lane, which receives
requests, answers, deaths and replacements. Only the times of single steps are recorded just for a
timeline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import count
from time import perf_counter
from typing import Any

from typing_extensions import override

from trawl.collectors.config import warn
from trawl.collectors.watch.times import BatchTimes, TurnClock
from trawl.collectors.watch.trace_lanes import (
    DRIVER,
    LEARNER,
    SCHEDULER,
    BatchLane,
    Shifts,
    WorkerLane,
    is_moved,
)
from trawl.collectors.workers.assembler import WorkerBatch
from trawl.observe.timeline_file import TraceWriter, rewrite
from trawl.observe.trace_options import TraceOptions
from trawl.rollout.times import StepSamples

# Seconds between two values of the counters.
_COUNTERS = 0.1


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
