"""Plots of a collection."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trawl.observe.episodes import Episodes

# The running mean covers a tenth of the episodes, but at most this number of episodes.
_LONGEST_MEAN = 100
_MOST_POINTS = 20_000


def plot_returns(episodes: Episodes, file: str | os.PathLike[str], title: str = "") -> None:
    """Plots the return of each episode and a running mean, against the number of frames.

    Args:
        episodes: the episodes to plot.
        file: path of the file to write; its suffix (``.png``, ``.pdf``, ``.svg``) sets the format.
        title: title of the plot.

    Raises:
        ImportError: if matplotlib is not installed (``pip install 'trawl-rl[plot]'``).
        ValueError: if there is no episode, or matplotlib does not support the format.
        OSError: if the file can't be written.

    Examples:
        >>> import os, tempfile
        >>> import numpy as np
        >>> from trawl.observe import Episodes
        >>> from trawl.extras.monitors.plots import plot_returns
        >>> number = np.arange(50)
        >>> episodes = Episodes(number, -1000.0 / (1 + number), number * 0 + 200, number * 200)
        >>> file = os.path.join(tempfile.mkdtemp(), "returns.png")
        >>> plot_returns(episodes, file)
        >>> os.path.getsize(file) > 0
        True
    """
    if not len(episodes):
        raise ValueError("no episode has ended, so there are no returns to plot")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "plots need matplotlib: pip install 'trawl-rl[plot]'", name="matplotlib"
        ) from None
    # Without pyplot, there are no windows and no global state, and nothing has to be closed.
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, episodes)
    # A dollar sign in the title doesn't begin a formula.
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    figure.savefig(os.fspath(file))


def _draw(axes: Any, episodes: Episodes) -> None:
    points = slice(None, None, -(-len(episodes) // _MOST_POINTS))
    axes.plot(
        episodes.ends[points],
        episodes.returns[points],
        linestyle="none",
        marker="o",
        markersize=4,
        markeredgewidth=0,
        color="#4c78a8",
        alpha=0.45,
        label="an episode",
    )
    window = mean_window(len(episodes))
    if window > 1:
        axes.plot(
            episodes.ends[window - 1 :],
            running_mean(episodes.returns, window),
            color="#c2410c",
            linewidth=2,
            label=f"mean of the last {window}",
        )
    axes.set_xlabel("frames")
    axes.set_ylabel("return")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    # The legend is outside the axes, so that it hides no episode.
    axes.figure.legend(frameon=False, loc="outside lower right", ncols=2)


def mean_window(count: int) -> int:
    """Returns the number of values that a running mean of ``count`` values covers.

    Examples:
        >>> mean_window(5), mean_window(200), mean_window(10_000)
        (1, 20, 100)
    """
    return min(_LONGEST_MEAN, max(1, count // 10))


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Returns the mean of each sequence of ``window`` successive values.

    Examples:
        >>> running_mean(np.array([1.0, 3.0, 5.0]), 2).tolist()
        [2.0, 4.0]
    """
    means: NDArray[np.float64] = np.lib.stride_tricks.sliding_window_view(values, window).mean(-1)
    return means
