"""Thinning of traces, so that a page with a long trace stays small.

Time is divided into buckets. The spans of a lane that are shorter than a bucket are joined within
each bucket, by name. The time that a name takes in a bucket stays exact. Only the order of the
spans within the bucket is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trawl.cli.html.trace import SPANS, Series, Spans

_FIRST_BUCKETS = 1 << 16


@dataclass(frozen=True)
class Lane:
    """Spans of one thread, sorted by time.

    Attributes:
        starts: times at which spans begin, in microseconds from the beginning of the trace.
        lengths: their lengths in microseconds; 0 for an instant.
        names: indices of their names in :data:`~trawl.cli.html.trace.SPANS`.
    """

    starts: NDArray[np.float64]
    lengths: NDArray[np.float64]
    names: NDArray[np.int64]

    @classmethod
    def of(cls, spans: Spans, beginning: float) -> Lane:
        """Returns the spans of a trace that begins at a time."""
        starts = np.array(spans.starts) - beginning
        order = np.argsort(starts, kind="stable")
        names = np.array(spans.names, np.int64)
        return cls(starts[order], np.array(spans.lengths)[order], names[order])

    def __len__(self) -> int:
        return len(self.starts)

    def select(self, chosen: NDArray[np.bool_]) -> Lane:
        """Returns some of the spans."""
        return Lane(self.starts[chosen], self.lengths[chosen], self.names[chosen])

    def of_name(self, name: str) -> Lane:
        """Returns the spans of a name."""
        return self.select(self.names == SPANS.index(name))

    def busy(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns how much time spans took before each of several times, if none overlap."""
        before = np.r_[0.0, np.cumsum(self.lengths)]
        last = np.searchsorted(self.starts, times, side="right")
        # The last span that began may last on.
        starts, lengths = np.r_[0.0, self.starts][last], np.r_[0.0, self.lengths][last]
        busy: NDArray[np.float64] = before[last] - np.maximum(0.0, starts + lengths - times)
        return busy

    def totals(self) -> dict[str, tuple[int, float]]:
        """Returns the number of spans and their time in microseconds, by name."""
        counts = np.bincount(self.names, minlength=len(SPANS))
        times = np.bincount(self.names, self.lengths, len(SPANS))
        found = zip(SPANS, counts.tolist(), times.tolist(), strict=True)
        return {name: (count, time) for name, count, time in found if count}


def thinned(lanes: Sequence[Lane], duration: float, most: int) -> tuple[list[Lane], float]:
    """Returns lanes with at most ``most`` spans together, if buckets of time suffice for it.

    Args:
        lanes: spans of each thread.
        duration: duration of the trace in microseconds.
        most: number of spans to keep.

    Returns:
        The lanes, and the length of a bucket in microseconds; 0 if nothing was joined.
    """
    if sum(map(len, lanes)) <= most:
        return list(lanes), 0.0
    buckets = _FIRST_BUCKETS
    while True:
        bucket = duration / buckets
        found = [_joined(lane, bucket) for lane in lanes]
        if sum(map(len, found)) <= most or buckets == 1:
            return found, bucket
        buckets //= 2


def _joined(lane: Lane, bucket: float) -> Lane:
    """Joins spans that are shorter than a bucket."""
    is_short = lane.lengths < bucket
    short, long = lane.select(is_short), lane.select(~is_short)
    if not len(short):
        return lane
    places = (short.starts // bucket).astype(np.int64)
    # One key for each bucket and name; keys are sorted by time, and then by name.
    keys, inverse = np.unique(places * len(SPANS) + short.names, return_inverse=True)
    lengths = np.bincount(inverse, short.lengths).astype(np.float64)
    first = np.full(len(keys), np.inf)
    np.minimum.at(first, inverse, short.starts)
    starts = _laid_out(keys // len(SPANS), first, lengths)
    merged = np.concatenate([starts, long.starts])
    order = np.argsort(merged, kind="stable")
    return Lane(
        merged[order],
        np.concatenate([lengths, long.lengths])[order],
        np.concatenate([keys % len(SPANS), long.names])[order],
    )


def _laid_out(
    buckets: NDArray[np.int64], first: NDArray[np.float64], lengths: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns starts of joined spans, which follow each other from the first one of a bucket on."""
    heads = np.flatnonzero(np.r_[True, buckets[1:] != buckets[:-1]])
    sizes = np.diff(np.r_[heads, len(buckets)])
    before = np.cumsum(lengths) - lengths
    begin = np.minimum.reduceat(first, heads)
    starts: NDArray[np.float64] = np.repeat(begin - before[heads], sizes) + before
    return starts


def thinned_series(
    series: Series, beginning: float, duration: float, most: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns times from the beginning and values of a counter, at most ``most`` of each.

    If there are more, each bucket of time keeps its smallest and its largest value.

    Args:
        series: the counter.
        beginning: time at which the trace begins.
        duration: duration of the trace in microseconds.
        most: number of values to keep.
    """
    times, values = np.array(series.times) - beginning, np.array(series.values)
    order = np.argsort(times, kind="stable")
    times, values = times[order], values[order]
    if len(times) <= most:
        return times, values
    buckets = np.minimum(times / (duration or 1.0) * (most // 2), most // 2 - 1).astype(np.int64)
    by_value = np.lexsort((values, buckets))
    edges = buckets[by_value]
    lowest = np.r_[True, edges[1:] != edges[:-1]]
    highest = np.r_[edges[1:] != edges[:-1], True]
    kept = np.sort(by_value[lowest | highest])
    return times[kept], values[kept]
