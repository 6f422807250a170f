"""Panel that shows the progress of a collection on a terminal or in a notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.text import Text

from trawl.extras.monitors.bars import (
    PART_COLORS,
    PARTS,
    fit,
    progress_bar,
    sparkline,
    stacked_bar,
)
from trawl.extras.monitors.progress_state import ProgressState
from trawl.observe.bottleneck import driver_line
from trawl.observe.episodes import show_logged
from trawl.observe.formats import plural, short, show_duration

# Largest width of a sparkline, and of the part of a line that a title takes.
_SPARK, _TITLE_SHARE = 30, 0.4
# Smallest number of rows below the heading of the table, if the terminal is low.
_ROWS = 3
_GAP = "  "


class ProgressPanel(JupyterMixin):
    """Lines that show the state of a collection, and fit the terminal.

    Args:
        state: state of the collection.
        title: text before the progress bar.
        height: largest number of lines; None for no limit.
    """

    def __init__(self, state: ProgressState, title: str, height: int | None) -> None:
        self._state = state
        self._title = title
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines(options.max_width):
            line.truncate(options.max_width)
            line.no_wrap = True
            yield line

    def lines(self, width: int) -> list[Text]:
        """Returns the lines; each of them fits the width unless it is below 40 characters."""
        head = [*self._progress(width), self._frames(width), self._episodes(width)]
        logged = show_logged(self._state.stats)
        if logged:
            head.append(Text(fit(logged, width)))
        if self._state.note:
            head.append(Text(fit(self._state.note, width), "yellow"))
        tail = [*self._driver(width), *self._bottleneck(width)]
        room = None
        if self._height is not None:
            room = self._height - len(head) - len(tail) - 1
            if room < _ROWS:
                tail = [self._short_bottleneck(width)]
                room = max(1, self._height - len(head) - len(tail) - 1)
        table = table_lines(worker_rows(self._state, room), width)
        return [*head, *table, *tail][: self._height]

    def _progress(self, width: int) -> list[Text]:
        """Returns a line with the title and the bar; no line if both are missing."""
        state = self._state
        if state.total is None:
            return [Text(fit(self._title, width), "bold")] if self._title else []
        title = fit(self._title, int(_TITLE_SHARE * width))
        share = min(1.0, state.frames / state.total) if state.total else 1.0
        # Never 100% before the end.
        after = f"{int(100 * share)}%"
        if state.left is not None:
            after += f"{_GAP}{show_duration(state.left)} left"
        before = title + _GAP if title else ""
        size = width - Text(before).cell_len - len(_GAP) - len(after)
        bar = progress_bar(share, size)
        return [Text.assemble((before, "bold"), bar, _GAP, after)]

    def _frames(self, width: int) -> Text:
        state = self._state
        done = f"{state.frames:,}"
        if state.total is not None:
            done += f"/{state.total:,}"
        rate = f"{state.recent.rate:,.0f} frames/s"
        text, since = f"{done} frames", f" in {show_duration(state.elapsed)}"
        if len(text) + len(since) + len(_GAP) + len(rate) <= width:
            text += since
        text += _GAP
        room = min(_SPARK, width - len(text) - len(rate) - 1)
        spark = sparkline(state.recent.rates(room), low=0.0)
        return Text.assemble(text, (rate, "bold"), " ", (spark, "cyan"))

    def _episodes(self, width: int) -> Text:
        episodes = self._state.episodes
        if not episodes.count:
            return Text("no episode has ended", "dim")
        text = f"{plural(episodes.count, 'episode')}{_GAP}length {short(episodes.recent_length)}"
        value = f"return {short(episodes.recent_return)}"
        room = min(_SPARK, width - len(text) - len(_GAP) - len(value) - 1)
        returns = _spread(self._state.returns, room)
        spark = sparkline(returns)
        return Text.assemble(text, _GAP, (value, "bold"), " ", (spark, "cyan"))

    def _driver(self, width: int) -> list[Text]:
        """Returns a line about the driver thread, if there are workers."""
        stats = self._state.stats
        if not self._state.workers or "wait_share" not in stats:
            return []
        return [Text(fit(driver_line(stats, self._state.learner), width), "dim")]

    def _bottleneck(self, width: int) -> list[Text]:
        lines = textwrap.wrap(str(self._state.bottleneck), max(20, width))
        return [Text(line) for line in lines]

    def _short_bottleneck(self, width: int) -> Text:
        return Text(fit(str(self._state.bottleneck), width))


def _spread(values: list[float], count: int) -> list[float]:
    """Returns at most ``count`` of the values, evenly spread, with the last one."""
    if count < 2 or len(values) < 2:
        return []
    if len(values) <= count:
        return values
    step = (len(values) - 1) / (count - 1)
    return [values[round(number * step)] for number in range(count)]


# Widths of the bar of shares, and the space between two columns.
_NARROW_BAR, _WIDE_BAR, _COLUMN_GAP = 10, 24, 2
_BAR = "share of time"


@dataclass(frozen=True)
class WorkerRow:
    """Figures of a worker, or of several workers together.

    Attributes:
        label: text before the figures.
        shares: shares of the time, in the order of ``PART_COLORS``; empty before the first batch.
        rate: frames per second; None if they are not known.
        frames: number of frames.
        restarts: number of restarts.
        dead: True for a worker that has died and has not been replaced yet.
        note: text after the figures.
    """

    label: str
    shares: Sequence[float]
    rate: float | None
    frames: float
    restarts: int = 0
    dead: bool = False
    note: str = ""


def worker_rows(state: ProgressState, room: int | None) -> list[WorkerRow]:
    """Returns a row for each worker that there is room for, and one for all workers together.

    The workers for which there is no room have one row together, with their mean figures. Dead
    workers and the bottleneck have a row of their own in preference to others. A collector without
    workers has one row.

    Args:
        state: state of the collection.
        room: largest number of rows; None for no limit.
    """
    every = [_row_of(state, index) for index in range(state.workers)]
    if len(every) < 2:
        return every or [_row("collector", state.stats, "")]
    together = _row("all", state.stats, "")
    if room is None or len(every) + 1 <= room:
        return [*every, together]
    # The row of all workers, and that of the workers without a row of their own.
    shown = _chosen(state, every, max(0, room - 2))
    hidden = [row for index, row in enumerate(every) if index not in shown]
    return [*(every[index] for index in sorted(shown)), _mean_row(hidden), together][: max(1, room)]


def _chosen(state: ProgressState, rows: Sequence[WorkerRow], count: int) -> set[int]:
    """Returns the numbers of the workers that have a row of their own."""
    straggler = state.bottleneck.worker
    order = sorted(range(len(rows)), key=lambda i: (not rows[i].dead, i != straggler, i))
    return set(order[:count])


def _row_of(state: ProgressState, index: int) -> WorkerRow:
    return _row(f"worker {index}", state.stats, f"worker_{index}/")


def _row(label: str, stats: dict[str, Any], prefix: str) -> WorkerRow:
    shares = [stats.get(f"{prefix}{part}_share") for part in PART_COLORS]
    return WorkerRow(
        label,
        [] if None in shares else [float(share or 0) for share in shares],
        stats.get(f"{prefix}frames_per_second"),
        stats.get(f"{prefix}frames", 0),
        stats.get(f"{prefix}restarts", 0),
        not stats.get(f"{prefix}alive", True),
    )


def _mean_row(rows: Sequence[WorkerRow]) -> WorkerRow:
    """Returns a row with the mean figures of several workers."""
    busy = [row.shares for row in rows if row.shares]
    shares = [sum(column) / len(busy) for column in zip(*busy, strict=True)]
    rates = [row.rate for row in rows if row.rate is not None]
    dead = sum(row.dead for row in rows)
    return WorkerRow(
        f"{len(rows):,} more",
        shares,
        sum(rates) / len(rates) if rates else None,
        sum(row.frames for row in rows) / len(rows),
        sum(row.restarts for row in rows),
        note=f"mean, {dead:,} dead" if dead else "mean",
    )


@dataclass(frozen=True)
class _Column:
    """A column of the table of rows.

    Attributes:
        title: heading, in plain text or with a color.
        cells: a cell for each row.
        left: True if the cells are aligned to the left.
    """

    title: Text
    cells: list[Text]
    left: bool = False

    @property
    def width(self) -> int:
        return max(cell.cell_len for cell in (self.title, *self.cells))

    def lines(self) -> list[Text]:
        """Returns the heading and the cells, padded to the same width."""
        width, padded = self.width, []
        for cell in (self.title, *self.cells):
            space = " " * (width - cell.cell_len)
            padded.append(Text.assemble(cell, space) if self.left else Text.assemble(space, cell))
        return padded


def table_lines(rows: Sequence[WorkerRow], width: int) -> list[Text]:
    """Returns a heading and a line for each row, without the columns that don't fit.

    Args:
        rows: the rows.
        width: width in characters.
    """
    columns = _columns(rows)
    used = -_COLUMN_GAP
    kept: set[str] = set()
    for name in _by_importance(rows):
        needed = _COLUMN_GAP + (_NARROW_BAR if name == _BAR else columns[name].width)
        if used + needed <= width or not kept:
            kept.add(name)
            used += needed
    if _BAR in kept:
        columns[_BAR] = _bar_column(rows, min(_WIDE_BAR, _NARROW_BAR + width - used))
    lines = [columns[name].lines() for name in columns if name in kept]
    return [Text(" " * _COLUMN_GAP).join(cells) for cells in zip(*lines, strict=True)]


def _by_importance(rows: Sequence[WorkerRow]) -> list[str]:
    """Returns the names of the columns; if there is little room, the last ones are left out."""
    names = ["worker", "frames/s", _BAR]
    names += ["note"] if any(row.note for row in rows) else []
    names += ["restarts"] if any(row.restarts for row in rows) else []
    return [*names, "env", "policy", "idle", "overhead", "weights", "frames"]


def _columns(rows: Sequence[WorkerRow]) -> dict[str, _Column]:
    """Returns the columns by their names, from left to right."""
    columns = {
        "worker": _column("", [row.label for row in rows], left=True),
        _BAR: _bar_column(rows, _NARROW_BAR),
        "frames/s": _Column(Text("frames/s", "dim"), [_rate(row) for row in rows]),
    }
    for number, (part, color) in enumerate(PART_COLORS.items()):
        title = Text.assemble((PARTS[number], color), (f" {part}", "dim"))
        cells = [f"{row.shares[number]:.0%}" if row.shares else "-" for row in rows]
        columns[part] = _Column(title, [Text(cell) for cell in cells])
    columns["frames"] = _column("frames", [f"{row.frames:,.0f}" for row in rows])
    restarts = [Text(f"{row.restarts:,}" if row.restarts else "", "yellow") for row in rows]
    columns["restarts"] = _Column(Text("restarts", "dim"), restarts)
    columns["note"] = _column("", [row.note for row in rows], left=True)
    return columns


def _column(title: str, cells: list[str], left: bool = False) -> _Column:
    return _Column(Text(title, "dim"), [Text(cell) for cell in cells], left)


def _bar_column(rows: Sequence[WorkerRow], width: int) -> _Column:
    title = Text(_BAR if len(_BAR) <= width else "time", "dim")
    return _Column(title, [stacked_bar(row.shares, width) for row in rows], left=True)


def _rate(row: WorkerRow) -> Text:
    if row.dead:
        return Text("dead", "bold red")
    if row.rate is None:
        return Text("-")
    return Text(f"{row.rate:,.0f}" if row.rate >= 10 else short(row.rate))
