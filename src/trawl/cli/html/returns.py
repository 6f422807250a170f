"""The section of the report on the returns and lengths of episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trawl.cli.html.axes import Axis
from trawl.cli.html.charts import chart, dots, line
from trawl.cli.html.markup import Markup, details, note, section, table
from trawl.observe.episodes import Episodes, EpisodeStats, Moments
from trawl.observe.formats import plural, short
from trawl.observe.plots import mean_window, running_mean

# Numbers of dots and of points of a line in a chart, and number of rows of a table of its data.
_MOST_DOTS, _MOST_POINTS, _MOST_ROWS = 2000, 1000, 20


def returns_section(stats: EpisodeStats | None, episodes: Episodes, frames: int) -> Markup:
    """Returns the section.

    Args:
        stats: statistics of the episodes; None if the dataset has no suitable entries.
        episodes: the episodes.
        frames: number of frames in the dataset.
    """
    content: list[Markup] = []
    if stats is None:
        why = (
            "The dataset has no rewards, done flags and trajectory ids from which episodes follow."
        )
        content = [note(why)]
    elif not len(episodes):
        content = [note("No episode has ended, so there are no returns and lengths.")]
    else:
        content = [
            _moments(stats),
            _chart("return", episodes.returns, episodes, frames),
            _chart("length", episodes.lengths.astype(np.float64), episodes, frames),
        ]
    return section("episodes", "Episodes", *content)


def _moments(stats: EpisodeStats) -> Markup:
    rows = [["return", *_numbers(stats.returns)], ["length", *_numbers(stats.lengths)]]
    caption = f"{plural(stats.count, 'episode')} that ended"
    return table("episodes-table", caption, ("", "mean", "std", "min", "max"), rows)


def _numbers(found: Moments) -> list[str]:
    return [short(value) for value in (found.mean, found.std, found.low, found.high)]


def _chart(name: str, values: NDArray[Any], episodes: Episodes, frames: int) -> Markup:
    x = Axis(0.0, float(max(frames, 1)), "frames")
    y = Axis.around(values, name, 0.0 if name == "length" else None)
    every = slice(None, None, -(-len(values) // _MOST_DOTS))
    layers = [dots(x.place(episodes.ends[every]), y.place(values[every]), "c-env")]
    legend = [("dots c-env", "an episode")]
    window = mean_window(len(values))
    if window > 1:
        ends, means = episodes.ends[window - 1 :], running_mean(values, window)
        some = slice(None, None, -(-len(means) // _MOST_POINTS))
        layers.append(line(x.place(ends[some]), y.place(means[some]), "c-policy"))
        legend.append(("line c-policy", f"mean of the last {window:,} episodes"))
    finite = values[np.isfinite(values)]
    missing = len(values) - len(finite)
    notes = [note(f"Not drawn: {plural(missing, 'episode')} without a finite {name}.")]
    return chart(
        name,
        f"{name.capitalize()} of each episode, over the number of frames when it ended",
        _description(name, finite, len(values), frames),
        x,
        y,
        layers,
        *(notes if missing else ()),
        details("Data", _rows(name, values, episodes)),
        legend=legend,
    )


def _description(name: str, finite: NDArray[Any], count: int, frames: int) -> str:
    text = f"{name.capitalize()} of {plural(count, 'episode')} over {plural(frames, 'frame')}"
    if not len(finite):
        return f"{text}; none is finite."
    tenth = max(1, len(finite) // 10)
    first, last = finite[:tenth].mean(), finite[-tenth:].mean()
    return (
        f"{text}, from {short(finite.min())} to {short(finite.max())}. The mean of the first "
        f"{plural(tenth, 'episode')} is {short(first)}, and that of the last {short(last)}."
    )


def _rows(name: str, values: NDArray[Any], episodes: Episodes) -> Markup:
    """Returns a table with the episodes in a few groups."""
    groups = np.array_split(np.arange(len(values)), min(_MOST_ROWS, len(values)))
    rows = []
    for group in groups:
        found = values[group]
        numbers = (found.mean(), found.min(), found.max())
        rows.append(
            [
                f"{episodes.ends[group[-1]]:,}",
                f"{len(group):,}",
                *(short(float(n)) for n in numbers),
            ]
        )
    heads = ("up to frame", "episodes", "mean", "min", "max")
    return table(
        f"{name}-values", f"{name.capitalize()} in groups of episodes", heads, rows, text=1
    )
