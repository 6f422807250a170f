"""The growth, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import HAND
from multi.growth import COUNTS, KILOBYTES
from multi.race import Result
from report import COLOURS


def write_growth(path: Path, workers: Sequence[Result], sizes: Result | None) -> None:
    """Speed, start and memory by the number of workers, and speed by the size of observations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(9, 6.4))
    panels = grid.flat
    _by_count(panels[0], workers, "speed", "frames per second")
    _by_count(panels[1], workers, "first_batch", "seconds to the first batch")
    _by_count(panels[2], workers, "rss", "MiB in the driver (RSS)")
    if sizes is not None:
        by_size = {size: (sizes, f"speed_{size}") for size in KILOBYTES}
        _draw(panels[3], by_size, "frames per second")
        panels[3].set(xlabel="KB per observation, 2 workers", yscale="log")
    lines = {
        label: line
        for axes in panels
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _by_count(axes: Any, workers: Sequence[Result], measure: str, label: str) -> None:
    points = {count: (result, measure) for count, result in zip(COUNTS, workers, strict=False)}
    _draw(axes, points, label)
    axes.set_xlabel("workers in lockstep, one Pendulum each")
    axes.set_ylim(bottom=0)


def _draw(axes: Any, points: dict[int, tuple[Result, str]], label: str) -> None:
    """One line for each contender; `points` tells which result has what belongs at an `x`."""
    names = {
        contender.name for result, _ in points.values() for contender in result.race.contenders
    }
    for name in sorted(names, key=list(COLOURS).index if names <= set(COLOURS) else str):
        medians = {x: result.median(name, measure) for x, (result, measure) in points.items()}
        drawn = {x: y for x, y in medians.items() if y is not None}
        if drawn:
            style = "--" if name == HAND else "-"
            colour = COLOURS.get(name, "#444444")
            axes.plot(drawn.keys(), drawn.values(), style, marker="o", color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(points), [str(x) for x in points])
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
