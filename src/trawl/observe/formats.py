"""Numbers and counts as text."""

from __future__ import annotations

import math


def short(value: float) -> str:
    """Formats a number with about four digits.

    Examples:
        >>> [short(number) for number in (-1234.56, 21.5, 0.01234, float("nan"))]
        ['-1,235', '21.5', '0.01234', '-']
    """
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.4g}"


def plural(count: int, noun: str) -> str:
    """Formats a count with a noun in the singular or plural.

    Examples:
        >>> plural(1, "batch"), plural(1200, "frame")
        ('1 batch', '1,200 frames')
    """
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}{ending}"


def show_bytes(size: float) -> str:
    """Formats a number of bytes in a suitable unit.

    Examples:
        >>> show_bytes(17), show_bytes(123_456), show_bytes(5e9)
        ('17 B', '123.5 kB', '5.0 GB')
    """
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def show_duration(seconds: float) -> str:
    """Formats a time span.

    Examples:
        >>> [show_duration(seconds) for seconds in (7.6, 75, 7384, 200_000)]
        ['0:07', '1:15', '2:03:04', '2 d 7 h']
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24:,} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
