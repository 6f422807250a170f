"""Characters for bars and sparklines, with replacements for terminals that show ASCII only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

#: Activities that divide a worker's time, in the order of a bar, with the color of each.
PART_COLORS = {
    "env": "green",
    "policy": "magenta",
    "overhead": "yellow",
    "weights": "blue",
    "idle": "bright_black",
}


@dataclass(frozen=True)
class Glyphs:
    """Characters with which a panel is drawn.

    Attributes:
        spark: characters of a sparkline, from the lowest to the highest.
        done: the finished part of a progress bar.
        rest: the rest of a progress bar.
        ends: texts before and after a progress bar.
        parts: a character for each of the ``PART_COLORS``, so that the parts differ without color.
        ellipsis: end of a text that was cut.
        encoding: encoding that the terminal can show.
    """

    spark: str
    done: str
    rest: str
    ends: tuple[str, str]
    parts: str
    ellipsis: str
    encoding: str

    def fit(self, text: str, width: int) -> str:
        """Returns a text on one line, without characters that can't be shown, cut to a width."""
        line = " ".join(text.split()).encode(self.encoding, "replace").decode(self.encoding)
        shown = Text(line)
        if shown.cell_len <= width:
            return shown.plain
        shown.truncate(max(0, width - len(self.ellipsis)))
        return (shown.plain.rstrip() + self.ellipsis)[: max(0, width)]

    def sparkline(self, values: Sequence[float], low: float | None = None) -> str:
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
            return self.spark[0] * len(values)
        steps = len(self.spark) - 1
        return "".join(self.spark[round((value - bottom) / height * steps)] for value in values)

    def progress_bar(self, share: float, width: int) -> Text:
        """Returns a bar of which a share is done."""
        opening, closing = self.ends
        inner = max(0, width - len(opening) - len(closing))
        done = min(inner, int(share * inner))
        return Text.assemble(
            opening, (self.done * done, "cyan"), (self.rest * (inner - done), "dim"), closing
        )

    def stacked_bar(self, shares: Sequence[float], width: int) -> Text:
        """Returns a bar that is divided as given by the shares of the ``PART_COLORS``.

        Without shares, the bar is empty.
        """
        bar = Text()
        # Without shares, there are no sizes either.
        sizes = divided(shares, width)
        for glyph, color, size in zip(self.parts, PART_COLORS.values(), sizes, strict=False):
            bar.append(glyph * size, color)
        return bar


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "━", "─", ("", ""), "█▓▒░·", "…", "utf-8")
ASCII = Glyphs("_.-=+*#", "#", "-", ("[", "]"), "#=+~.", "...", "ascii")


def glyphs_for(console: Console) -> Glyphs:
    """Returns the characters that a console can show."""
    ascii_only = not console.encoding.lower().startswith("utf") or _is_c_locale()
    return ASCII if ascii_only else UNICODE


def _is_c_locale() -> bool:
    """Returns True if the user asked for the C locale, in which Python still writes UTF-8."""
    # Python replaces LC_CTYPE by C.UTF-8 in the C locale, so this variable tells nothing then.
    kind = os.environ.get("LC_CTYPE", "")
    if kind == "C.UTF-8":
        kind = ""
    named = os.environ.get("LC_ALL") or kind or os.environ.get("LANG") or ""
    return named in ("C", "POSIX")


def divided(shares: Sequence[float], whole: int) -> list[int]:
    """Divides a whole number by shares, so that the parts add up to the number.

    Examples:
        >>> from trawl.extras.monitors.glyphs import divided
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
