"""Draws how many frames a driver takes in by the number of workers, for docs/planning-clusters.md.

    python docs/scripts/planning_page.py

Both axes are logarithmic. Lines are what formulas give, dots what events do.
"""

from __future__ import annotations

import math
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 990, 460
LEFT, RIGHT, TOP, BOTTOM = 90, 700, 30, 400
INK, GRID, PALE = "#333333", "#e3e3e3", "#9a9a9a"
COLOURS = {
    "process": "#0b7a75",
    "ray": "#c8553d",
    "group": "#5b7fa3",
    "rpc": "#b48a2c",
    "tree": "#7d4f9e",
}

NAMES = {
    "process": "processes",
    "ray": "Ray",
    "group": "process groups",
    "rpc": "RPC",
    "tree": "Ray, a tree",
}


def drawing(found: dict[str, Any]) -> str:
    """The whole picture."""
    chosen = [f"{where}, {kind}" for where in found["places"] for kind in ("async", "sync")]
    chosen = [name for name in chosen if name in found["curves"]]
    speed = found["work"]["speed"]
    counts = found["curves"][chosen[0]]["workers"]
    alone = [speed * count for count in counts]
    scale = Scale(counts[0], counts[-1], speed / 2, max(alone))
    parts = [*scale.grid(), *scale.curve(counts, alone, PALE, "2 5")]
    parts.append(text(RIGHT - 4, scale.y(alone[-1]) - 10, "all that workers make", "end", PALE))
    for row, name in enumerate(chosen):
        where, kind = name.split(", ")
        curve, colour = found["curves"][name], COLOURS.get(where, INK)
        dash = "" if kind == "async" else "9 4"
        parts += scale.curve(curve["workers"], curve["formula"], colour, dash)
        parts += scale.dots(curve["workers"], curve["events"], colour)
        parts += legend(
            row, colour, dash, NAMES[where] + ("" if kind == "async" else ", in lockstep")
        )
    body = "\n  ".join(parts)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"
     font-family="sans-serif" font-size="14" fill="{INK}">
  <title>Frames per second by the number of workers</title>
  <rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>
  {body}
</svg>
"""


class Scale:
    """Where numbers are in the picture."""

    def __init__(self, fewest: float, most: float, slowest: float, fastest: float) -> None:
        self._x = math.log10(fewest), math.log10(most)
        self._y = math.log10(slowest), math.log10(fastest)

    def x(self, value: float) -> float:
        low, high = self._x
        return LEFT + (RIGHT - LEFT) * (math.log10(value) - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self._y
        return BOTTOM - (BOTTOM - TOP) * (math.log10(value) - low) / (high - low)

    def grid(self) -> list[str]:
        """The axes, with a line for each power of ten of frames, and of four of workers."""
        found = []
        for power in range(math.ceil(self._y[0]), math.floor(self._y[1]) + 1):
            y = self.y(10**power)
            found += [
                line(LEFT, y, RIGHT, y, GRID),
                text(LEFT - 10, y + 5, f"{10**power:,}", "end"),
            ]
        for power in range(0, 13, 2):
            x = self.x(2**power)
            found += [line(x, TOP, x, BOTTOM, GRID), text(x, BOTTOM + 22, f"{2**power:,}")]
        found.append(text((LEFT + RIGHT) / 2, BOTTOM + 46, "workers"))
        return [*found, text(LEFT - 10, TOP - 12, "frames/s", "end")]

    def curve(self, counts: list[float], values: list[float], colour: str, dash: str) -> list[str]:
        """A line through points."""
        points = " ".join(
            f"{self.x(count):.1f},{self.y(value):.1f}"
            for count, value in zip(counts, values, strict=True)
        )
        style = f' stroke-dasharray="{dash}"' if dash else ""
        return [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{style}/>'
        ]

    def dots(self, counts: list[float], values: list[float], colour: str) -> list[str]:
        """The points of as many numbers of workers as there are values."""
        return [
            f'<circle cx="{self.x(count):.1f}" cy="{self.y(value):.1f}" r="3.5" fill="{colour}"/>'
            for count, value in zip(counts, values, strict=False)
        ]


def legend(row: int, colour: str, dash: str, label: str) -> list[str]:
    """What a line is of."""
    y = TOP + 20 + 26 * row
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return [
        f'<path d="M{RIGHT + 30},{y} h44" stroke="{colour}" stroke-width="2"{style}/>',
        text(RIGHT + 84, y + 5, label, "start"),
    ]


def line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<path d="M{x1:.1f},{y1:.1f} L{x2:.1f},{y2:.1f}" stroke="{colour}"/>'


def text(x: float, y: float, content: str, anchor: str = "middle", fill: str = INK) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"'
    return f"<text {place}>{escape(content)}</text>"
