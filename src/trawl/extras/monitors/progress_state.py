"""State of a collection that a progress display shows."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from trawl.observe.bottleneck import Bottleneck
from trawl.observe.episodes import EpisodeStats
from trawl.polling import poll

# Seconds after which a batch compares its count of frames with that of the collector.
_SETTLED = 1.0


class ProgressState:
    """Statistics of a collection, from its batches and from the collector's ``stats()``.

    A batch only updates what can't be computed later. The collector's statistics are taken when
    they are shown, and once a second to compare the counts of frames. The methods may be called
    from several threads, except for :meth:`add` and :meth:`finish`.

    Args:
        collector: the collector.
        find_bottleneck: function that finds the bottleneck in the collector's statistics.
        learner: word for the work of the caller between two batches.

    Attributes:
        learner: that word.
        episodes: statistics of the episodes seen.
        seconds: seconds from the construction of this object to the last batch.
        stats: the statistics of the collector that were taken last.
        total: number of frames to collect; None for an endless collection.
        recent: frame counts of the last minute.
        note: a note for the user.
    """

    def __init__(
        self,
        collector: Any,
        find_bottleneck: Callable[[Mapping[str, Any]], Bottleneck],
        learner: str = "learner",
    ) -> None:
        self.learner = learner
        self.episodes = EpisodeStats()
        self.seconds = 0.0
        self.note = ""
        self._collector = collector
        self._find_bottleneck = find_bottleneck
        self._started = time.perf_counter()
        self._ended = False
        self._lock = threading.Lock()
        self._stale = False
        self.stats = poll(self._collector)
        self._first = self._offset = self.frames
        self._settled = 0.0
        exact = getattr(collector, "exact_frames", False)
        self.total: int | None = (
            self.stats.get("total_frames") if exact else _whole_batches(self.stats)
        )
        self.recent = RecentFrames(self._started, self.frames)
        self._throughput, self._returns = ThinnedSeries(), ThinnedSeries()
        self._throughput.add(0.0, 0)

    def add(self, batch: TensorDictBase) -> None:
        """Adds a batch that the collector delivered."""
        self.episodes.update(batch)
        self.seconds = time.perf_counter() - self._started
        self._stale = True
        # After its last batch, the collector ends its workers.
        ends = self.total is not None and self.counted >= self.total
        if ends or self.seconds - self._settled >= _SETTLED:
            self.refresh(settled=True)
        self._throughput.add(self.seconds, self.counted - self._first)

    def refresh(self, settled: bool = False) -> None:
        """Takes the collector's statistics, if there was a batch since they were taken.

        Args:
            settled: True if each batch that was delivered has been added. Elsewhere, the latest
                batch may be in the collector's count of frames, but not in :attr:`counted` yet.
        """
        with self._lock:
            if not self._stale:
                return
            # A batch that arrives in the meantime sets it again.
            self._stale = False
            seconds, seen = self.seconds, self.episodes.frames
            try:
                self.stats = poll(self._collector)
            except BaseException:
                self._stale = True
                raise
            if settled:
                self._offset, self._settled = self.frames - seen, seconds
            self.recent.add(self._started + seconds, self.frames)
            value = self.episodes.recent_return
            if math.isfinite(value):
                self._returns.add(self.frames, value)

    def finish(self) -> None:
        """Takes the statistics for the last time, and stops the clock."""
        self._ended = True
        before = self.stats
        # An error of the collector is raised where its batches are taken.
        with suppress(Exception):
            self.refresh()
        # If the collector has ended in the meantime, so have its workers, but none of them died.
        alive = {name: value for name, value in before.items() if name.endswith("alive")}
        self.stats = self.stats | alive

    # --- derived figures

    @property
    def frames(self) -> int:
        """Number of frames when the statistics were taken."""
        return int(self.stats["frames"])

    @property
    def counted(self) -> int:
        """Number of frames up to the last batch, counted without asking the collector."""
        return self._offset + self.episodes.frames

    @property
    def workers(self) -> int:
        """Number of workers; 0 for a collector without workers."""
        return int(self.stats.get("workers", 0))

    def of(self, index: int, name: str) -> Any:
        """Returns a statistic of a worker, or None if it is not known."""
        return self.stats.get(f"worker_{index}/{name}")

    @property
    def bottleneck(self) -> Bottleneck:
        """The part that limits the rate."""
        return self._find_bottleneck(self.stats)

    @property
    def throughput(self) -> list[tuple[float, int]]:
        """Pairs of seconds and frames since this object was made, at most 200, evenly spread."""
        return [(seconds, int(frames)) for seconds, frames in self._throughput.points]

    @property
    def returns(self) -> list[float]:
        """Recent mean returns over the course of the collection, at most 200 of them."""
        return [value for _, value in self._returns.points]

    @property
    def elapsed(self) -> float:
        """Seconds since this object was made, up to the end of the collection."""
        return self.seconds if self._ended else time.perf_counter() - self._started

    @property
    def left(self) -> float | None:
        """Estimated seconds until the end; None if they are unknown, or if it has been reached."""
        rate = self.recent.rate
        if self.total is None or self._ended or self.frames >= self.total or rate <= 0:
            return None
        return max(0.0, (self.total - self.frames) / rate - (self.elapsed - self.seconds))


def _whole_batches(stats: Mapping[str, Any]) -> int | None:
    """Returns ``total_frames`` rounded up to whole batches; None without a limit."""
    total, batch = stats.get("total_frames"), stats["requested_frames_per_batch"]
    return None if total is None else math.ceil(total / batch) * batch


# Seconds that recent frame counts cover, seconds over which the rate is computed, and the smallest
# distance between two points in seconds.
_WINDOW, _RATE_SECONDS, _SPACING = 60.0, 10.0, 0.25
# With slow batches, this number of points is kept and used, however old they are.
_AT_LEAST = 6
_AT_MOST = 2 * int(_WINDOW / _SPACING)


class ThinnedSeries:
    """Points with growing x, which are thinned evenly when there are too many of them.

    The first and the latest point are always kept. Adding a point takes constant time on average.

    Args:
        limit: largest number of points.

    Examples:
        >>> from trawl.extras.monitors.progress_state import ThinnedSeries
        >>> series = ThinnedSeries(limit=5)
        >>> for second in range(101):
        ...     series.add(second, 10 * second)
        >>> series.points[0], series.points[-1], len(series.points) <= 5
        ((0, 0), (100, 1000), True)
    """

    def __init__(self, limit: int = 200) -> None:
        self._limit = limit
        self._spacing = 0.0
        self._kept: list[tuple[float, float]] = []
        self._latest: tuple[float, float] | None = None

    def add(self, x: float, y: float) -> None:
        """Adds a point; its x must not be smaller than that of the latest point."""
        self._latest = (x, y)
        if self._kept and x - self._kept[-1][0] <= self._spacing:
            return
        self._kept.append(self._latest)
        # The latest point may come on top of those that are kept.
        if len(self._kept) >= self._limit:
            self._thin()

    def _thin(self) -> None:
        first, *rest = self._kept
        self._spacing = (self._kept[-1][0] - first[0]) / (self._limit // 2)
        kept = [first]
        for point in rest:
            if point[0] - kept[-1][0] > self._spacing:
                kept.append(point)
        self._kept = kept

    @property
    def points(self) -> list[tuple[float, float]]:
        """The points, in their order."""
        kept, latest = list(self._kept), self._latest
        return kept if latest is None or kept[-1:] == [latest] else [*kept, latest]


class RecentFrames:
    """Frame counts of the last minute, and the rates that follow from them.

    Args:
        now: point in time, in seconds.
        frames: number of frames at this time.
    """

    def __init__(self, now: float, frames: int) -> None:
        self._points: deque[tuple[float, int]] = deque([(now, frames)], maxlen=_AT_MOST)

    def add(self, now: float, frames: int) -> None:
        """Adds the number of frames at a later time."""
        points = self._points
        if len(points) > 1 and now - points[-2][0] < _SPACING:
            points.pop()
        points.append((now, frames))
        while len(points) > _AT_LEAST and points[1][0] < now - _WINDOW:
            points.popleft()

    @property
    def rate(self) -> float:
        """Frames per second over the last seconds; 0 before the first frames."""
        points = list(self._points)
        now, frames = points[-1]
        old = sum(1 for then, _ in points if then <= now - _RATE_SECONDS)
        then, before = points[max(0, min(old - 1, len(points) - _AT_LEAST))]
        return (frames - before) / (now - then) if now > then else 0.0

    def rates(self, count: int) -> list[float]:
        """Returns the rates in equal intervals of the last minute.

        Args:
            count: largest number of intervals. There are fewer of them during the first seconds.
        """
        times, frames = zip(*list(self._points), strict=True)
        began, ended = max(times[0], times[-1] - _WINDOW), times[-1]
        count = min(count, int((ended - began) / (2 * _SPACING)))
        if count < 2:
            return []
        edges = np.linspace(began, ended, count + 1)
        steps = np.diff(np.interp(edges, times, frames)) * count / (ended - began)
        return [float(rate) for rate in steps]
