"""Figures of those who collect: a collector's own loop, or its workers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from typing_extensions import override

from trawl.collectors.config import CollectorConfig
from trawl.collectors.driver.budget import FrameBudget
from trawl.collectors.watch.times import WorkerTimes, shares_of
from trawl.collectors.watch.tracer import LocalTracer, Tracer
from trawl.collectors.watch.watching import Watch
from trawl.observe.trace_options import TraceOptions
from trawl.rollout.episode_sums import EndedEpisodes
from trawl.rollout.loop import Rollout
from trawl.rollout.restarts import EnvRestarts


class Figures(ABC):
    """Counts and times of those who collect, for statistics and timelines.

    Attributes:
        batches_ready: number of batches that are finished but not delivered.
        queue_depth: number of requests that workers have not answered.
    """

    batches_ready = queue_depth = 0

    @abstractmethod
    def pop_waited(self) -> float:
        """Returns the seconds since the last call in which the thread waited for frames."""

    @abstractmethod
    def shares(self) -> dict[str, Any]:
        """Returns how workers, or a collector without workers, divide their time."""

    def aggregate(self) -> dict[str, Any]:
        """Returns statistics of the collector as a whole."""
        return {}

    def per_worker(self) -> dict[str, Any]:
        """Returns the statistics of each worker, and how many workers there are."""
        return {}

    def end_turn(self, frames: int, tracer: Tracer | None) -> None:  # noqa: B027 (workers tell it)
        """Measures a turn that has just ended, in which ``frames`` frames were counted."""

    # --- timelines

    @abstractmethod
    def new_tracer(self, options: TraceOptions) -> Tracer:
        """Makes the object that draws a timeline."""

    @abstractmethod
    def connect(self, tracer: Tracer | None) -> None:
        """Notes that a timeline begins, or ends with None."""

    def counters(self) -> dict[str, float]:
        """Returns the values of the timeline's counters."""
        return {}


class RolloutFigures(Figures):
    """Figures of the loop of a collector without workers.

    Args:
        config: options of the collector.
        budget: the collector's frames.
        watch: clock and recent episodes of the collector.

    Attributes:
        rollout: the inner loop; None until it is made.
        restarts: the environments that were rebuilt; None if none are.
    """

    def __init__(self, config: CollectorConfig, budget: FrameBudget, watch: Watch) -> None:
        self._config, self._budget, self._watch = config, budget, watch
        self.rollout: Rollout | None = None
        self.restarts: EnvRestarts | None = None
        self._times = WorkerTimes()
        # Numbers of episodes, and of their frames, that are counted as progress already.
        self._counted = 0, 0

    @override
    def pop_waited(self) -> float:
        # The driver thread collects the batch itself.
        return math.inf

    @override
    def shares(self) -> dict[str, Any]:
        return shares_of([self._times])

    @override
    def aggregate(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if self.restarts is not None:
            facts["env_restarts"] = self.restarts.count
        if self.rollout is not None:
            facts.update(self.rollout.writer.describe())
            facts["env_time_share"] = self.rollout.times.env_share
        return facts

    @override
    def end_turn(self, frames: int, tracer: Tracer | None) -> None:
        assert self.rollout is not None
        times = self._watch.clock.batch_times(self.rollout.times)
        self._times.add(times, frames)
        self._watch.episodes.add(*self.count(frames))
        if isinstance(tracer, LocalTracer):
            tracer.batch(times, frames, self.rollout.pop_steps())

    def count(self, frames: int) -> EndedEpisodes:
        """Counts collected frames, and returns the episodes that have ended since the last call."""
        assert self.rollout is not None
        sums, progress = self.rollout.writer.sums, self._budget.own
        count, ended = self._counted
        self._counted = sums.count, sums.frames
        progress.stepped_frames += frames
        progress.completed_trajectories += sums.count - count
        progress.trajectory_completed_frames += sums.frames - ended
        progress.trajectory_pending_frames = sums.unfinished
        return sums.pop()

    def skip(self, frames: int) -> None:
        """Counts frames that are not delivered: neither their time nor their episodes count."""
        assert self.rollout is not None
        self._watch.clock.batch_times(self.rollout.times)
        self.count(frames)

    @override
    def new_tracer(self, options: TraceOptions) -> Tracer:
        return LocalTracer("trace", options)

    @override
    def connect(self, tracer: Tracer | None) -> None:
        # The constructor begins a timeline before it makes the inner loop.
        if self.rollout is not None:
            self.rollout.record_steps(tracer is not None and tracer.samples_steps)

    @override
    def counters(self) -> dict[str, float]:
        facts = {} if self.rollout is None else self.rollout.writer.describe()
        names = {"batches_held": "batches held", "memory_bytes": "memory"}
        return {names[name]: facts[name] for name in names if name in facts}
