"""Charts, and their axes, as inline SVG.

The lines of a chart are stretched to the width of the page. Its labels are HTML, which keeps its
size on a narrow page. Each chart has a text that describes it, and a table of its data.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trawl.extras.report.markup import Markup, figure, joined, tag

# Each step between two ticks is one of these numbers times a power of ten.
_STEPS = (1, 2, 2.5, 5, 10)
# A tick may miss the end of its axis by this share of a step, due to rounding.
_ROUNDING = 1e-9
_LARGEST = sys.float_info.max
# Shorter steps can't be computed.
_FINEST = 1e-300
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# Size of a drawing in its own units, before it is stretched.
WIDTH, HEIGHT = 1000, 300
# There are gaps between bars if they are few: this share of their width.
_FEW_BARS, _GAP = 32, 0.08

_Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Axis:
    """Range of values that an axis shows.

    Attributes:
        low: value at the beginning of the axis.
        high: value at its end.
        label: what the values are.
    """

    low: float
    high: float
    label: str

    @classmethod
    def around(cls, values: NDArray[Any], label: str, start: float | None = None) -> Axis:
        """Returns an axis that shows all finite values and some room beside them.

        Args:
            values: the values.
            label: what the values are.
            start: value at which the axis begins, if this value is close to the smallest one.
        """
        finite = values[np.isfinite(values)].astype(np.float64)
        if not len(finite):
            return cls(0.0, 1.0, label)
        low, high = float(finite.min()), float(finite.max())
        # Half values, because the difference of two large values may exceed the range of floats.
        room = (high / 2 - low / 2) / 10 or abs(low) / 20 or 0.5
        low, high = max(low - room, -_LARGEST), min(high + room, _LARGEST)
        if start is not None and abs(low - start) <= 2 * room:
            low = start
        return cls(low, high, label)

    def place(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Returns the places of values, from 0 at the beginning of the axis to 1 at its end."""
        half = self.high / 2 - self.low / 2
        places: NDArray[np.float64] = (values.astype(np.float64) / 2 - self.low / 2) / half
        return places

    def ticks(self, most: int = 6) -> list[float]:
        """Returns round values to mark on the axis, at most ``most`` of them."""
        rough = (self.high / 2 - self.low / 2) / most * 2
        if rough < _FINEST:
            return []
        power = 10.0 ** math.floor(math.log10(rough))
        for factor in _STEPS:
            step = factor * power
            first = math.ceil(self.low / step - _ROUNDING)
            last = math.floor(self.high / step + _ROUNDING)
            if last - first < most:
                ticks = (number * step for number in range(first, last + 1))
                return [min(self.high, max(self.low, tick)) for tick in ticks]
        return []


def compact(value: float) -> str:
    """Formats a number in few characters.

    Examples:
        >>> [compact(number) for number in (0, 0.25, -1250, 20_000, 2_500_000)]
        ['0', '0.25', '-1,250', '20k', '2.5M']
    """
    return compact_all([value])[0]


def compact_all(values: Sequence[float]) -> list[str]:
    """Formats numbers, such as the ticks of an axis, in few characters and the same unit.

    Examples:
        >>> compact_all([0, 5000, 10_000])
        ['0', '5k', '10k']
    """
    largest = max(map(abs, values), default=0.0)
    if 10_000 <= largest < 1e15:
        unit, suffix = next(each for each in _SUFFIXES if largest >= each[0])
        return [f"{value / unit:.4g}{suffix}" if value else "0" for value in values]
    return [f"{v:,.0f}" if 1000 <= abs(v) < 10_000 else f"{v:.4g}" for v in values]


def chart(
    name: str,
    caption: str,
    description: str,
    x: Axis,
    y: Axis,
    layers: Sequence[Markup],
    *more: str,
    legend: Sequence[tuple[str, str]] = (),
) -> Markup:
    """Returns a chart with axes, as a figure.

    Args:
        name: id of the chart.
        caption: caption of the figure.
        description: text that says what the chart shows, for readers that don't see it.
        x: the horizontal axis.
        y: the vertical axis.
        layers: shapes, from back to front.
        *more: further content of the figure, such as a table of the data.
        legend: class and meaning of each kind of shape.
    """
    across, up = x.ticks(), y.ticks()
    names = compact_all(up)
    rows = [
        tag("span", text, style=f"bottom:{100 * at:.2f}%")
        for text, at in zip(names, y.place(np.array(up)), strict=True)
    ]
    columns = [
        tag("span", text, style=f"left:{100 * at:.2f}%")
        for text, at in zip(compact_all(across), x.place(np.array(across)), strict=True)
    ]
    drawing = svg(description, joined([_grid(x, y, across, up), *layers]))
    plot = tag(
        "div",
        tag("p", y.label, class_="y-label", aria_hidden="true"),
        tag("div", *rows, class_="y-ticks", aria_hidden="true"),
        drawing,
        tag("div", *columns, class_="x-ticks", aria_hidden="true"),
        tag("p", x.label, class_="x-label", aria_hidden="true"),
        class_="plot",
        style=f"--ticks:{max(map(len, names), default=1)}ch",
    )
    keys = [tag("li", _swatch(kind), text) for kind, text in legend]
    shown = [tag("ul", *keys, class_="legend")] if keys else []
    return figure(f"{name}-caption", caption, plot, *shown, *more)


def svg(description: str, content: str, width: int = WIDTH, height: int = HEIGHT) -> Markup:
    """Returns a drawing that is stretched to the size of its place.

    Args:
        description: text for readers that don't see the drawing.
        content: the shapes.
        width: width of the drawing in its own units.
        height: height of the drawing in its own units.
    """
    return tag(
        "svg",
        content,
        viewBox=f"0 0 {width} {height}",
        preserveAspectRatio="none",
        role="img",
        aria_label=description,
    )


def dots(x: _Numbers, y: _Numbers, kind: str) -> Markup:
    """Returns a dot for each pair of places; places that are not finite are left out."""
    shown = np.isfinite(x) & np.isfinite(y)
    # A line without length has round ends, which are not stretched with the drawing.
    points = (f"M{a} {b}h0" for a, b in _points(x[shown], y[shown]))
    return tag("path", d="".join(points), class_=f"dots {kind}")


def line(x: _Numbers, y: _Numbers, kind: str, steps: bool = False) -> Markup:
    """Returns a line through places, with a gap at each place that is not finite.

    Args:
        x: places on the horizontal axis.
        y: places on the vertical axis.
        kind: class of the line.
        steps: True for a line that jumps at each place, and is level before it.
    """
    parts, last = [], ""
    for (a, b), shown in zip(_points(x, y), np.isfinite(x) & np.isfinite(y), strict=True):
        if not shown:
            last = ""
        elif not last:
            parts.append(f"M{a} {b}")
            last = "begun"
        else:
            parts.append(f"V{b}H{a}" if steps else f"L{a} {b}")
    return tag("path", d="".join(parts), class_=f"line {kind}")


def bars(edges: _Numbers, heights: _Numbers, kind: str) -> Markup:
    """Returns adjacent bars.

    Args:
        edges: places between the bars on the horizontal axis; one more than there are bars.
        heights: heights of the bars, from 0 to 1.
        kind: class of the bars.
    """
    lefts, rights = edges[:-1], edges[1:]
    if len(heights) <= _FEW_BARS:
        rights = rights - _GAP * (rights - lefts)
    ends = zip(_points(lefts, heights), _points(rights, heights), strict=True)
    parts = [
        f"M{left} {HEIGHT}V{top}H{right}V{HEIGHT}z"
        for (left, top), (right, _) in ends
        if top != str(HEIGHT)
    ]
    return tag("path", d="".join(parts), class_=f"bars {kind}")


def _points(x: _Numbers, y: _Numbers) -> list[tuple[str, str]]:
    """Returns places in the units of a drawing."""
    across = np.nan_to_num(x) * WIDTH
    down = (1 - np.nan_to_num(y)) * HEIGHT
    return [(f"{a:.5g}", f"{b:.4g}") for a, b in zip(across, down, strict=True)]


def _grid(x: Axis, y: Axis, across: Sequence[float], up: Sequence[float]) -> Markup:
    columns = (f"M{WIDTH * at:.1f} 0V{HEIGHT}" for at in x.place(np.array(across)))
    rows = (f"M0 {HEIGHT * (1 - at):.1f}H{WIDTH}" for at in y.place(np.array(up)))
    return tag("path", d="".join([*columns, *rows]), class_="grid")


def _swatch(kind: str) -> Markup:
    """Returns a sample of the shapes of a kind, such as ``dots c-env``."""
    shape = tag("path", d="M5 7h0" if kind.startswith("dots") else "M1 7h18", class_=kind)
    return tag("svg", shape, viewBox="0 0 20 14", class_="swatch", aria_hidden="true")
