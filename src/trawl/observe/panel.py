"""Panel that shows the progress of a collection on a terminal or in a notebook."""

from __future__ import annotations

import textwrap

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from trawl.observe.episodes import show_logged
from trawl.observe.formats import plural, short, show_duration
from trawl.observe.glyphs import Glyphs
from trawl.observe.progress_state import ProgressState
from trawl.observe.worker_rows import table_lines, worker_rows

# Largest width of a sparkline, and of the part of a line that a title takes.
_SPARK, _TITLE_SHARE = 30, 0.4
# Smallest number of rows below the heading of the table, if the terminal is low.
_ROWS = 3
_GAP = "  "


class ProgressPanel:
    """Lines that show the state of a collection, and fit the terminal.

    Args:
        state: state of the collection.
        title: text before the progress bar.
        glyphs: characters to draw with.
        height: largest number of lines; None for no limit.
    """

    def __init__(
        self, state: ProgressState, title: str, glyphs: Glyphs, height: int | None
    ) -> None:
        self._state = state
        self._title = title
        self._glyphs = glyphs
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
            head.append(Text(self._glyphs.fit(logged, width)))
        if self._state.note:
            head.append(Text(self._glyphs.fit(self._state.note, width), "yellow"))
        tail = [*self._driver(width), *self._bottleneck(width)]
        room = None
        if self._height is not None:
            room = self._height - len(head) - len(tail) - 1
            if room < _ROWS:
                tail = [self._short_bottleneck(width)]
                room = max(1, self._height - len(head) - len(tail) - 1)
        table = table_lines(worker_rows(self._state, room), width, self._glyphs)
        return [*head, *table, *tail][: self._height]

    def _progress(self, width: int) -> list[Text]:
        """Returns a line with the title and the bar; no line if both are missing."""
        state = self._state
        if state.total is None:
            return [Text(self._glyphs.fit(self._title, width), "bold")] if self._title else []
        title = self._glyphs.fit(self._title, int(_TITLE_SHARE * width))
        share = min(1.0, state.frames / state.total) if state.total else 1.0
        # Never 100% before the end.
        after = f"{int(100 * share)}%"
        if state.left is not None:
            after += f"{_GAP}{show_duration(state.left)} left"
        before = title + _GAP if title else ""
        size = width - Text(before).cell_len - len(_GAP) - len(after)
        bar = self._glyphs.progress_bar(share, size)
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
        spark = self._glyphs.sparkline(state.recent.rates(room), low=0.0)
        return Text.assemble(text, (rate, "bold"), " ", (spark, "cyan"))

    def _episodes(self, width: int) -> Text:
        episodes = self._state.episodes
        if not episodes.count:
            return Text("no episode has ended", "dim")
        text = f"{plural(episodes.count, 'episode')}{_GAP}length {short(episodes.recent_length)}"
        value = f"return {short(episodes.recent_return)}"
        room = min(_SPARK, width - len(text) - len(_GAP) - len(value) - 1)
        returns = _spread(self._state.returns, room)
        spark = self._glyphs.sparkline(returns)
        return Text.assemble(text, _GAP, (value, "bold"), " ", (spark, "cyan"))

    def _driver(self, width: int) -> list[Text]:
        """Returns a line about the driver thread, if there are workers."""
        stats = self._state.stats
        if not self._state.workers or "wait_share" not in stats:
            return []
        learner, wait, driver = (stats[f"{name}_share"] for name in ("learner", "wait", "driver"))
        text = f"driver thread: {wait:.0%} waiting, {driver:.0%} collector, {learner:.0%} learner"
        return [Text(self._glyphs.fit(text, width), "dim")]

    def _bottleneck(self, width: int) -> list[Text]:
        lines = textwrap.wrap(str(self._state.bottleneck), max(20, width))
        return [Text(line) for line in lines]

    def _short_bottleneck(self, width: int) -> Text:
        return Text(self._glyphs.fit(str(self._state.bottleneck), width))


def _spread(values: list[float], count: int) -> list[float]:
    """Returns at most ``count`` of the values, evenly spread, with the last one."""
    if count < 2 or len(values) < 2:
        return []
    if len(values) <= count:
        return values
    step = (len(values) - 1) / (count - 1)
    return [values[round(number * step)] for number in range(count)]
