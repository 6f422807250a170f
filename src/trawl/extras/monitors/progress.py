"""Progress of a collection, shown on a terminal or in a notebook."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from tensordict import TensorDictBase

from trawl.extras.monitors.bars import PART_COLORS
from trawl.extras.monitors.panel import ProgressPanel
from trawl.extras.monitors.progress_state import ProgressState
from trawl.observe.bottleneck import Bottleneck, bottleneck_of
from trawl.observe.episodes import EpisodeStats
from trawl.observe.formats import plural, short

# Without a terminal, a line is printed after each tenth of the frames, and whenever the previous
# line is 30 s old.
_LINES, _SECONDS = 10, 30.0
_PER_SECOND = 4
# Smallest share of the time that a line has.
_LEAST_SHARE = 0.005


class CollectionProgress:
    """Shows the progress of a collection.

    On a terminal whose encoding is UTF-8, or in a notebook, the display is a panel that is updated
    until the ``with`` block ends. It shows the progress and the time left, the rate during the last
    minute, the returns of recent episodes, how each worker divides its time, and the bottleneck.
    Elsewhere, a line without escape codes, which has the same figures, is printed from time to
    time. Both go to the standard error stream, unless ``console`` is given.

    The display calls the collector's ``stats()`` a few times a second. Workers are not queried, so
    the display does not delay them.

    Args:
        collector: the collector whose ``stats()`` are shown.
        title: text before the bar, and at the beginning of each line.
        console: console to print to; by default, the standard error stream.
        find_bottleneck: function that finds the bottleneck in ``stats()``; by default, the
            function that ``collector.bottleneck()`` uses.
        learner: word for the work of the caller between two batches.

    Examples:
        >>> from trawl import Collector
        >>> from trawl.observe import CollectionProgress
        >>> with (
        ...     Collector("Pendulum-v1", frames_per_batch=100, total_frames=400) as collector,
        ...     CollectionProgress(collector, "Pendulum") as progress,
        ... ):
        ...     for batch in collector:
        ...         progress.update(batch)
        >>> progress.episodes.count
        2
    """

    def __init__(
        self,
        collector: Any,
        title: str = "",
        console: Console | None = None,
        *,
        find_bottleneck: Callable[[Mapping[str, Any]], Bottleneck] = bottleneck_of,
        learner: str = "learner",
    ) -> None:
        self._state = ProgressState(collector, find_bottleneck, learner)
        # A path may have bytes that no terminal shows.
        self._title = title.encode("utf-8", "replace").decode()
        self._console = console or _stderr()
        self._live: Live | None = None
        # A handle of IPython for a notebook's output.
        self._cell: Any = None
        self._shown = time.perf_counter()
        self._printed = (self._shown, self._state.frames)

    def update(self, batch: TensorDictBase) -> None:
        """Updates the statistics with a batch that the collector delivered."""
        self._state.add(batch)
        # On a terminal, a thread renders the panel.
        if self._cell is not None:
            self._maybe_replace()
        elif self._live is None:
            self._maybe_print()

    def say(self, note: str) -> None:
        """Shows a note at once; safe to call from a signal handler."""
        self._state.note = note
        if self._live is None and self._cell is None:
            # Bypasses all buffers, since the signal may have interrupted a write to one of them.
            os.write(2, f"{note}\n".encode())

    # --- what is shown

    @property
    def episodes(self) -> EpisodeStats:
        """Statistics of the episodes seen."""
        return self._state.episodes

    @property
    def seconds(self) -> float:
        """Seconds from the construction of this object to the last batch."""
        return self._state.seconds

    @property
    def rate(self) -> float:
        """Frames per second over the last seconds."""
        return self._fresh.recent.rate

    @property
    def stats(self) -> dict[str, Any]:
        """The collector's statistics at the last batch, with those of each worker."""
        return self._fresh.stats

    @property
    def bottleneck(self) -> Bottleneck:
        """The part that limits the rate."""
        return self._fresh.bottleneck

    @property
    def throughput(self) -> list[tuple[float, int]]:
        """Pairs of seconds and frames since the construction of this object.

        There are at most 200 pairs, which are spread evenly over the collection.
        """
        return self._state.throughput

    @property
    def _fresh(self) -> ProgressState:
        self._state.refresh()
        return self._state

    def workers(self) -> list[list[str]]:
        """Returns a row of texts for each worker.

        A row has the worker's number, its frames, its rate, the share of time that it spends in
        its environment, and the number of its restarts.
        """
        return [self._line(index) for index in range(self._fresh.workers)]

    def _line(self, index: int) -> list[str]:
        def of(name: str) -> Any:
            return self._state.of(index, name)

        share, restarts = of("env_share"), of("restarts")
        rate = f"{of('frames_per_second') or 0:,.0f} frames/s"
        return [
            f"worker {index}",
            f"{of('frames') or 0:,} frames",
            rate if of("alive") else "dead",
            f"env {share:.0%}" if share else "",
            plural(restarts, "restart") if restarts else "",
        ]

    def figures(self) -> list[str]:
        """Returns the statistics that are shown with the count of frames, formatted as text."""
        stats, episodes = self._fresh.stats, self.episodes
        parts = [f"{self._state.recent.rate:,.0f} frames/s"]
        shares = ((part, stats.get(f"{part}_share") or 0.0) for part in PART_COLORS)
        if shown := [f"{part} {share:.0%}" for part, share in shares if share >= _LEAST_SHARE]:
            parts.append(", ".join(shown))
        if stats.get("restarts"):
            parts.append(plural(stats["restarts"], "restart"))
        if episodes.count:
            parts.append(plural(episodes.count, "episode"))
            parts.append(f"return {short(episodes.recent_return)}")
            parts.append(f"length {short(episodes.recent_length)}")
        return parts

    # --- on a terminal, and in a notebook

    def render(self) -> ProgressPanel:
        """Returns the panel."""
        # An error of the collector is raised where its batches are taken.
        with suppress(Exception):
            self._state.refresh()
        height = None if self._live is None else self._console.size.height
        return ProgressPanel(self._state, self._title, height)

    def _maybe_replace(self) -> None:
        """Shows the latest statistics in the notebook, a few times a second."""
        now = time.perf_counter()
        if self._cell is not None and now - self._shown >= 1 / _PER_SECOND:
            self._shown = now
            self._cell.update(self.render())

    def __enter__(self) -> CollectionProgress:
        if self._console.is_jupyter:
            from IPython.display import display

            self._cell = display(self.render(), display_id=True)
            return self
        usual = self._console.is_terminal and self._console.is_interactive
        if usual and not self._console.options.ascii_only:
            self._start_live()
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._state.finish()
            if self._cell is not None:
                self._cell.update(self.render())
                self._cell = None
        finally:
            if self._live is not None:
                self._stop_live()
                self._console.print()

    def _start_live(self) -> None:
        # Ctrl-C may arrive at any point from here on.
        atexit.register(self._show_cursor)
        self._live = Live(
            get_renderable=self.render,
            console=self._console,
            refresh_per_second=_PER_SECOND,
        )
        try:
            self._live.start()
        except BaseException:
            # A display that has not started fully can't be stopped without errors.
            with suppress(Exception):
                self._stop_live()
            raise

    def _stop_live(self) -> None:
        try:
            if self._live is not None:
                self._live.stop()
        finally:
            self._live = None
            self._show_cursor()
            atexit.unregister(self._show_cursor)

    def _show_cursor(self) -> None:
        self._console.show_cursor(True)

    # --- elsewhere

    def _maybe_print(self) -> None:
        now, frames = time.perf_counter(), self._state.counted
        then, before = self._printed
        total = self._state.total
        tenth = total is not None and frames * _LINES // total > before * _LINES // total
        if tenth or now - then >= _SECONDS:
            self._state.refresh(settled=True)
            figures = self.figures()
            frames = self._state.frames
            self._printed = now, frames
            done = f"{frames:,}" if total is None else f"{frames:,}/{total:,}"
            part = self._state.bottleneck.part
            part = self._state.learner if part == "learner" else part
            # Not every terminal shows the letters of all languages.
            plain = self._title.encode("ascii", "replace").decode()
            utf8 = self._console.encoding.startswith("utf")
            title = [self._title if utf8 else plain] if self._title else []
            line = "  ".join([*title, f"{done} frames", *figures, f"bottleneck {part}"])
            self._console.print(Text(line), soft_wrap=True)


def _stderr() -> Console:
    """Returns a console for the standard error stream.

    Variables such as ``FORCE_COLOR`` don't make a panel appear in a file. ``TTY_INTERACTIVE=0``
    suppresses the panel, which older versions of rich don't do themselves.
    """
    terminal = sys.stderr is not None and sys.stderr.isatty()
    wanted = terminal and os.environ.get("TTY_INTERACTIVE") != "0"
    return Console(file=sys.stderr, force_interactive=None if wanted else False)
