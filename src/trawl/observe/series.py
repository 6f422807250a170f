"""Series of points that grow during a collection, in bounded memory."""

from __future__ import annotations

from collections import deque

import numpy as np

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
        >>> from trawl.observe.series import ThinnedSeries
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
