"""Bars, sparklines and texts that are cut to a width, for terminals."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

#: Activities that divide a worker's time, in the order of a bar, with the color of each.
PART_COLORS = {
    "env": "green",
    "policy": "magenta",
    "overhead": "yellow",
    "weights": "blue",
    "idle": "bright_black",
}
#: A character for each of the ``PART_COLORS``, so that the parts differ without color.
PARTS = "█▓▒░·"
# Characters of a sparkline, from the lowest to the highest.
_SPARK = "▁▂▃▄▅▆▇█"


def fit(text: str, width: int) -> str:
    """Returns a text on one line, cut to a width."""
    line = Text(" ".join(text.split()))
    line.truncate(width, overflow="ellipsis")
    return line.plain if width > 0 else ""


def sparkline(values: Sequence[float], low: float | None = None) -> str:
    """Returns a line with one character for each value.

    Args:
        values: finite numbers.
        low: value of the lowest character; by default, the smallest value.
    """
    if not values:
        return ""
    bottom = min(values) if low is None else low
    height = max(values) - bottom
    if height <= 0:
        return _SPARK[0] * len(values)
    steps = len(_SPARK) - 1
    return "".join(_SPARK[round((value - bottom) / height * steps)] for value in values)


def progress_bar(share: float, width: int) -> Text:
    """Returns a bar of which a share is done."""
    width = max(0, width)
    done = min(width, int(share * width))
    return Text.assemble(("━" * done, "cyan"), ("─" * (width - done), "dim"))


def stacked_bar(shares: Sequence[float], width: int) -> Text:
    """Returns a bar that is divided as given by the shares of the ``PART_COLORS``.

    Without shares, the bar is empty.
    """
    bar = Text()
    # Without shares, there are no sizes either.
    sizes = divided(shares, width)
    for part, color, size in zip(PARTS, PART_COLORS.values(), sizes, strict=False):
        bar.append(part * size, color)
    return bar


def divided(shares: Sequence[float], whole: int) -> list[int]:
    """Divides a whole number by shares, so that the parts add up to the number.

    Examples:
        >>> from trawl.extras.monitors.bars import divided
        >>> divided([0.5, 0.25, 0.25], 10)
        [5, 3, 2]
    """
    total = sum(shares)
    if total <= 0:
        return [0] * len(shares)
    # What is left after rounding down goes to the parts that lost most.
    exact = [share / total * whole for share in shares]
    sizes = [int(size) for size in exact]
    rests = sorted(range(len(sizes)), key=lambda index: sizes[index] - exact[index])
    for index in rests[: whole - sum(sizes)]:
        sizes[index] += 1
    return sizes
