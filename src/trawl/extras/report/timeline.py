"""The section of the report with the timeline of a trace.

A span has a colour and a height by its name, so that the names differ without colours as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trawl.extras.report.charts import compact
from trawl.extras.report.markup import Markup, details, joined, note, section, table, tag
from trawl.extras.report.trace import MOST_COUNTERS, MOST_LANES, SPANS, Series, Spans, Trace
from trawl.observe.formats import plural, short

# Units of a lane's drawing for the whole trace: float32, which browsers use, has all of them.
_UNITS = 4_000_000
_HEIGHT = 20
# Numbers of spans of all lanes, and of values of a counter, to draw.
_MOST_SPANS, _MOST_VALUES = 50_000, 1000
# Top and bottom of the spans of each name, and what they show.
_STYLES = {
    "batch": (0, 2, "making a batch"),
    "env": (4, 20, "steps and resets of environments"),
    "policy": (9, 20, "calls of the policy"),
    "weights": (4, 12, "loading weights"),
    "wait": (15, 20, "waiting"),
    "restart": (0, 20, "replacing a worker"),
    "collect": (0, 2, "in the collector"),
    "learn": (4, 20, "code between batches"),
    "update": (4, 12, "sending weights"),
    "request": (4, 12, "request for a batch"),
    "deliver": (12, 20, "batch delivered"),
    "died": (0, 20, "death of the worker"),
    "other": (7, 17, "other"),
}
# These are drawn with a line of constant width, so that they can be seen however short they are.
_ALWAYS_SEEN = ("restart", "request", "deliver", "died")
# Parts that divide the time of a lane, from bottom to top, and the room for them.
_STACKED = ("env", "learn", "policy", "weights", "update", "other", "restart", "wait")
_STACK_TOP = 4
# Number of columns of all overviews together, and of one; a lane is dense if it has more spans.
_MOST_COLUMNS, _FINEST_COLUMNS, _COARSEST_COLUMNS = 24_000, 400, 60


@dataclass(frozen=True)
class _Scale:
    """Conversion of times to units.

    Attributes:
        duration: duration of the trace in microseconds.
    """

    duration: float

    def units(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.rint(times / self.duration * _UNITS).astype(np.int64)


def timeline_section(trace: Trace | None, why: str = "") -> Markup:
    """Returns the section.

    Args:
        trace: the trace; None if there is none.
        why: reason why there is no trace, or why it is not complete.
    """
    content = [note(why)] if why else []
    if trace is not None and (trace.lanes or trace.counters):
        content += _content(trace)
    elif not why:
        content.append(note("The trace has no events."))
    return section("timeline", "Timeline", *content)


def _content(trace: Trace) -> list[Markup]:
    beginning, duration = _extent(trace)
    scale = _Scale(duration)
    keys = trace.sorted_lanes()
    whole = [Lane.of(trace.lanes[key], beginning) for key in keys]
    labels = [trace.label(key) for key in keys]
    drawn, bucket = thinned(whole, duration, _MOST_SPANS)
    columns = _MOST_COLUMNS // max(1, len(keys))
    columns = max(_COARSEST_COLUMNS, min(_FINEST_COLUMNS, columns))
    rows = [
        _lane(label, every, lane, scale, columns)
        for label, every, lane in zip(labels, whole, drawn, strict=True)
    ]
    counters = [
        _counter(name, thinned_series(series, beginning, duration, _MOST_VALUES), scale)
        for name, series in trace.counters.items()
    ]
    notes = []
    if bucket:
        notes.append(
            note(
                f"Spans shorter than {_time(bucket)} are joined: within {_time(bucket)}, the time "
                "of each part is exact, but not the order."
            )
        )
    if any(len(lane) > columns for lane in whole):
        notes.append(
            note(
                "Where spans are too short to be seen, the height of each part is its share of the "
                "time. Zooming in shows the spans."
            )
        )
    if trace.left_out:
        notes.append(
            note(
                f"Not drawn: {plural(trace.left_out, 'event')} beyond {MOST_LANES} lanes and "
                f"{MOST_COUNTERS} counters."
            )
        )
    used = {name for lane in whole for name in lane.totals()}
    view = tag(
        "div",
        *rows,
        *counters,
        _axis(duration),
        class_="timeline",
        role="group",
        aria_label="Timeline",
        data_units=_UNITS,
        data_microseconds=f"{duration:.6g}",
    )
    caption = tag(
        "figcaption", f"What each thread did during {_time(duration)}", id="timeline-caption"
    )
    drawing = (caption, _controls(), view, _legend(used), *notes)
    return [
        tag("figure", *drawing, aria_labelledby="timeline-caption"),
        details("Data", _totals(labels, whole, duration), *_counter_table(trace)),
    ]


def _extent(trace: Trace) -> tuple[float, float]:
    """Returns the beginning and the duration of a trace in microseconds."""
    first, last = [], []
    for spans in trace.lanes.values():
        starts = np.array(spans.starts)
        first.append(starts.min())
        last.append((starts + np.array(spans.lengths)).max())
    for series in trace.counters.values():
        first.append(min(series.times))
        last.append(max(series.times))
    beginning = float(min(first))
    return beginning, float(max(last)) - beginning or 1.0


def _lane(label: str, whole: Lane, lane: Lane, scale: _Scale, columns: int) -> Markup:
    """Returns the drawing of a lane.

    If a lane is dense, its spans are narrower than a pixel. An overview replaces them until the
    reader zooms in: the height of each part is its share of the time in a column.
    """
    shapes = {
        name: _spans(name, lane.select(lane.names == number), scale)
        for number, name in enumerate(SPANS)
        if (lane.names == number).any()
    }
    dense = len(whole) > columns
    stack = [name for name in _STACKED if name in shapes] if dense else []
    content = [
        *(tag("g", _overview(whole, stack, scale, columns), class_="far") for _ in stack[:1]),
        tag("g", *(shapes[name] for name in stack), class_="near"),
        *(shape for name, shape in shapes.items() if name not in stack or name in _ALWAYS_SEEN),
    ]
    parts = ", ".join(
        f"{name} {time / scale.duration:.1%}" if time else plural(count, name)
        for name, (count, time) in whole.totals().items()
    )
    drawing = _drawing(f"{label}: {parts}", content, _HEIGHT)
    row = (tag("span", label, class_="lane-name"), drawing)
    return tag("div", *row, class_="lane dense" if stack else "lane", data_spans=len(whole))


def _overview(lane: Lane, names: Sequence[str], scale: _Scale, columns: int) -> Markup:
    """Returns a stack of the shares of several parts in each column of time."""
    edges = np.linspace(0, scale.duration, columns + 1)
    times = [np.diff(lane.of_name(name).busy(edges)) for name in names]
    shares = np.stack(times) / (edges[1] - edges[0])
    # Spans that overlap would take more than all of the time.
    shares /= np.maximum(1.0, shares.sum(0))
    tops = _HEIGHT - np.cumsum(shares, 0) * (_HEIGHT - _STACK_TOP)
    bottoms = np.concatenate([np.full((1, columns), _HEIGHT), tops[:-1]])
    x = scale.units(edges).tolist()
    paths = []
    for name, top, bottom in zip(names, tops, bottoms, strict=True):
        parts = [
            f"M{left} {low:.4g}V{high:.4g}H{right}V{low:.4g}z"
            for left, right, low, high in zip(x[:-1], x[1:], bottom, top, strict=True)
            if low - high > 0.05
        ]
        path = "".join(parts)
        paths.append(tag("path", tag("title", name), d=path, class_=f"span c-{name}"))
    return joined(paths)


def _spans(name: str, lane: Lane, scale: _Scale) -> Markup:
    top, bottom, _ = _STYLES[name]
    starts, stops = scale.units(lane.starts), scale.units(lane.starts + lane.lengths)
    widths = np.maximum(stops - starts, 1)
    height = bottom - top
    # Each move is relative to the beginning of the span before, which keeps the numbers short.
    moves = np.diff(starts, prepend=0)
    spans = zip(moves.tolist(), widths.tolist(), strict=True)
    path = "".join(f"m{move} 0h{width}v{height}h-{width}z" for move, width in spans)
    return tag(
        "path",
        tag("title", name),
        d=f"M0 {top}{path}",
        class_=f"span c-{name}{' seen' if name in _ALWAYS_SEEN else ''}",
    )


def _counter(
    name: str, found: tuple[NDArray[np.float64], NDArray[np.float64]], scale: _Scale
) -> Markup:
    times, values = found
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    # Half values, because the difference of two large values may exceed the range of floats.
    places = (values / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)
    heights = np.rint((1 - places) * 100).astype(int)
    x = scale.units(times)
    steps = "".join(f"H{a}V{b}" for a, b in zip(x[1:].tolist(), heights[1:].tolist(), strict=True))
    path = tag("path", d=f"M{x[0]} {heights[0]}{steps}H{_UNITS}", class_="line c-env")
    text = f"{name}: {compact(float(values.min()))} to {compact(float(values.max()))}"
    drawing = _drawing(f"Counter {text}, at the end {short(float(values[-1]))}", [path], 100)
    label = tag("span", text, class_="lane-name")
    return tag("div", label, drawing, class_="lane counter")


def _drawing(description: str, shapes: Sequence[Markup], height: int) -> Markup:
    return tag(
        "svg",
        joined(shapes),
        viewBox=f"0 0 {_UNITS} {height}",
        preserveAspectRatio="none",
        role="img",
        aria_label=description,
    )


def _axis(duration: float) -> Markup:
    labels = [
        tag("span", _time(duration * part / 4), style=f"left:{25 * part}%") for part in range(5)
    ]
    return tag("div", *labels, class_="x-ticks", aria_hidden="true")


def _controls() -> Markup:
    """Returns the buttons, which the script shows, and the range of time in view."""
    buttons = [
        tag("button", sign, type="button", aria_label=label, data_do=what)
        for what, sign, label in (
            ("in", "+", "Zoom in"),
            ("out", "\N{MINUS SIGN}", "Zoom out"),
            ("left", "◀", "Earlier"),
            ("right", "▶", "Later"),
            ("all", "All", "Show all"),
        )
    ]
    shown = tag("output", class_="range", role="status")
    help_text = tag("span", "Ctrl and wheel zoom, dragging moves.", class_="hint")
    return tag("div", *buttons, shown, help_text, class_="controls", hidden=True)


def _legend(used: set[str]) -> Markup:
    items = []
    for name in SPANS:
        if name in used:
            top, bottom, meaning = _STYLES[name]
            shape = tag("path", d=f"M0 {top}h24v{bottom - top}h-24z", class_=f"span c-{name}")
            swatch = tag("svg", shape, viewBox="0 0 24 20", class_="swatch", aria_hidden="true")
            items.append(tag("li", swatch, tag("span", tag("b", name), f": {meaning}")))
    return tag("ul", *items, class_="legend")


def _totals(labels: Sequence[str], lanes: Sequence[Lane], duration: float) -> Markup:
    rows = [
        [label, name, f"{count:,}", _time(time), f"{time / duration:.1%}"]
        for label, lane in zip(labels, lanes, strict=True)
        for name, (count, time) in lane.totals().items()
    ]
    heads = ("lane", "part", "spans", "time", "share of the trace")
    return table("timeline-totals", "Time of each part, by lane", heads, rows, text=2)


def _counter_table(trace: Trace) -> list[Markup]:
    rows = [
        [name, *(short(value) for value in (min(s.values), max(s.values), s.values[-1]))]
        for name, s in trace.counters.items()
    ]
    heads = ("counter", "min", "max", "last")
    return [table("timeline-counters", "Counters", heads, rows)] if rows else []


def _time(microseconds: float) -> str:
    """Formats a time in a suitable unit.

    Examples:
        >>> [_time(number) for number in (0, 12.5, 3400, 2_500_000)]
        ['0', '12.5 µs', '3.4 ms', '2.5 s']
    """
    for size, unit in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")):
        if microseconds >= size:
            return f"{microseconds / size:,.4g} {unit}"
    return "0" if not microseconds else f"{microseconds:.3g} µs"


_FIRST_BUCKETS = 1 << 16


@dataclass(frozen=True)
class Lane:
    """Spans of one thread, sorted by time.

    Attributes:
        starts: times at which spans begin, in microseconds from the beginning of the trace.
        lengths: their lengths in microseconds; 0 for an instant.
        names: indices of their names in :data:`~trawl.extras.report.trace.SPANS`.
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
