"""The section of the report on throughput."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trawl.cli.html.axes import Axis
from trawl.cli.html.charts import chart, line
from trawl.cli.html.markup import Markup, details, note, section, table
from trawl.cli.html.values import is_number
from trawl.observe.formats import short

# Limits for values from a record, which may come from a stranger.
_MOST_POINTS, _MOST_ROWS = 2000, 20


def throughput_section(info: dict[str, Any]) -> Markup:
    """Returns the section.

    Args:
        info: facts about the dataset, not yet checked.
    """
    content = _content(_points(info.get("throughput")))
    if not content:
        why = "No throughput was recorded: trawl collect records it at the end of a run."
        content = [note(why), *_overall(info)]
    return section("throughput", "Throughput", *content)


def _overall(info: dict[str, Any]) -> list[Markup]:
    seconds, frames = info.get("seconds"), info.get("frames")
    if info.get("resumed") or not is_number(seconds) or not is_number(frames) or seconds <= 0:
        return []
    rate = f"{frames / seconds:,.0f} frames/s"
    return [note(f"Over the whole collection, {frames:,} frames took {seconds:,} s: {rate}.")]


def _points(found: Any) -> NDArray[np.float64]:
    """Returns pairs of seconds and frames, in ascending order; what is no such pair is left out."""
    pairs: list[tuple[float, float]] = []
    for each in found[:_MOST_POINTS] if isinstance(found, list) else ():
        if isinstance(each, list) and len(each) == 2 and all(map(is_number, each)):
            seconds, frames = float(each[0]), float(each[1])
            if not pairs or (seconds > pairs[-1][0] and frames >= pairs[-1][1]):
                pairs.append((seconds, frames))
    return np.array(pairs).reshape(-1, 2)


def _content(points: NDArray[np.float64]) -> list[Markup]:
    if len(points) < 2:
        return []
    seconds, frames = points.T
    rates = np.diff(frames) / np.diff(seconds)
    overall = float((frames[-1] - frames[0]) / (seconds[-1] - seconds[0]))
    x = Axis(float(min(0.0, seconds[0])), float(seconds[-1]), "seconds")
    y = Axis.around(np.array([0.0, rates.max() or 1.0]), "frames/s", 0.0)
    # The first rate holds from the first point on.
    times, steps = seconds, np.concatenate([rates[:1], rates])
    mean = np.full(2, overall)
    layers = [
        line(np.array([0.0, 1.0]), y.place(mean), "c-policy dashed"),
        line(x.place(times), y.place(steps), "c-env", steps=True),
    ]
    description = (
        f"Frames per second over {short(float(seconds[-1]))} seconds, from "
        f"{short(float(rates.min()))} to {short(float(rates.max()))}; {short(overall)} on average."
    )
    legend = [
        ("line c-env", "frames per second"),
        ("line c-policy dashed", f"mean, {overall:,.0f} frames/s"),
    ]
    values = details("Data", _rows(seconds, frames))
    caption = "Frames per second, over time"
    return [chart("rate", caption, description, x, y, layers, values, legend=legend)]


def _rows(seconds: NDArray[np.float64], frames: NDArray[np.float64]) -> Markup:
    """Returns a table with the mean rates of a few spans of time."""
    places = np.linspace(0, len(seconds) - 1, min(_MOST_ROWS + 1, len(seconds))).astype(int)
    rows = []
    for a, b in pairwise(places):
        rate = (frames[b] - frames[a]) / (seconds[b] - seconds[a])
        rows.append([f"{seconds[b]:,.4g}", f"{frames[b]:,.0f}", short(float(rate))])
    heads = ("seconds", "frames", "frames/s")
    return table("rate-values", "Frames per second in spans of time", heads, rows)
