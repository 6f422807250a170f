"""Progress of a collection, shown on a terminal or in a notebook."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from tensordict import TensorDictBase

from trawl.observe.episodes import EpisodeStats

if TYPE_CHECKING:
    # This import needs IPython, which is installed wherever a notebook runs.
    from trawl.observe.notebook import CellOutput

# Without a terminal, a line is printed after each tenth of the frames, and whenever the previous
# line is 30 s old.
_LINES, _SECONDS = 10, 30.0
_PER_SECOND = 4
# Number of recent batches over which the rate is computed.
_RATE_BATCHES = 20


class CollectionProgress:
    """Shows the progress of a collection.

    On a terminal or in a notebook, the display is a bar with statistics below it, and is updated
    until the ``with`` block ends. If the collector has workers, a line for each worker follows.
    Elsewhere, a line without escape codes is printed now and then.

    Args:
        collector: the collector whose ``stats()`` are shown. The workers themselves are not
            queried, so the display does not delay them.
        title: text before the bar.
        console: console to print to; by default, the standard error stream.

    Attributes:
        episodes: statistics of the episodes seen.
        seconds: seconds from the construction of this object to the last batch.

    Example:
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

    def __init__(self, collector: Any, title: str = "", console: Console | None = None) -> None:
        self.episodes = EpisodeStats()
        self.seconds = 0.0
        self._collector = collector
        self._console = console or Console(file=sys.stderr)
        self._started = time.perf_counter()
        self._marks = _marks(self._started, 0)
        self._workers: int = getattr(collector, "num_workers", 0)
        self._facts = self._stats()
        self._worker_marks = [
            _marks(self._started, self._of(index, "frames")) for index in range(self._workers)
        ]
        self._note = ""
        self._live: Live | None = None
        self._cell: CellOutput | None = None
        self._shown = self._started
        self._printed = (self._started, 0)
        exact = getattr(collector, "exact_frames", False)
        self._total = self._facts.get("total_frames") if exact else _whole_batches(self._facts)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[frames]}"),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            auto_refresh=False,
            console=self._console,
        )
        self._task = self._bar.add_task(title, total=self._total, frames=self._count())

    def update(self, batch: TensorDictBase) -> None:
        """Updates the statistics with a batch that the collector delivered."""
        self.episodes.update(batch)
        self._facts = self._stats()
        now, frames = time.perf_counter(), int(self._facts["frames"])
        self.seconds = now - self._started
        self._marks.append((now, frames))
        for index, marks in enumerate(self._worker_marks):
            own = self._of(index, "frames")
            if own != marks[-1][1]:
                marks.append((now, own))
        self._bar.update(self._task, completed=frames, frames=self._count())
        if self._cell is not None:
            self._maybe_replace(now)
        elif self._live is None:
            self._maybe_print(now, frames)

    def say(self, note: str) -> None:
        """Shows a note at once; safe to call from a signal handler."""
        self._note = note
        if self._live is None and self._cell is None:
            # Bypasses all buffers, since the signal may have interrupted a write to one of them.
            os.write(2, f"{note}\n".encode())

    @property
    def rate(self) -> float:
        """Frames per second over the last batches."""
        return _rate(self._marks)

    def _stats(self) -> dict[str, Any]:
        view = ("both",) if self._workers else ()
        facts: dict[str, Any] = self._collector.stats(*view)
        return facts

    def _of(self, index: int, name: str) -> Any:
        """Returns a statistic of a worker, or None if it is not known."""
        return self._facts.get(f"worker_{index}/{name}")

    def workers(self) -> list[list[str]]:
        """Returns a row of texts for each worker.

        A row has the worker's number, its frames, its rate, the share of time that it spends in
        its environment, and the number of its restarts.
        """
        return [self._line(index) for index in range(self._workers)]

    def _line(self, index: int) -> list[str]:
        share, restarts = self._of(index, "env_time_share"), self._of(index, "restarts")
        rate = f"{_rate(self._worker_marks[index]):,.0f} frames/s"
        return [
            f"worker {index}",
            f"{self._of(index, 'frames'):,} frames",
            rate if self._of(index, "alive") else "dead",
            f"env {share:.0%}" if share else "",
            plural(restarts, "restart") if restarts else "",
        ]

    def figures(self) -> list[str]:
        """Returns the statistics that are shown with the count of frames, formatted as text."""
        parts = [f"{self.rate:,.0f} frames/s"]
        share = self._facts.get("env_time_share")
        if share:
            parts.append(f"env {share:.0%}, policy {1 - share:.0%}")
        if self._facts.get("restarts"):
            parts.append(plural(self._facts["restarts"], "restart"))
        if self.episodes.count:
            parts.append(plural(self.episodes.count, "episode"))
            parts.append(f"return {short(self.episodes.recent_return)}")
            parts.append(f"length {short(self.episodes.recent_length)}")
        return parts

    def _count(self) -> str:
        frames = self._facts["frames"]
        return f"{frames:,} frames" if self._total is None else f"{frames:,}/{self._total:,} frames"

    # --- on a terminal, and in a notebook

    def render(self) -> RenderableType:
        """Returns the bar with the statistics below it."""
        parts: list[RenderableType] = [self._bar]
        figures = "  ".join(self.figures())
        parts.append(Text(figures, style="dim", overflow="ellipsis", no_wrap=True))
        if self._note:
            parts.append(Text(self._note, style="yellow"))
        if self._workers:
            parts.append(self._table())
        return Group(*parts)

    def _table(self) -> Table:
        """Returns a table with a line for each worker.

        If there is no room for the whole table, its end is cut off.
        """
        table = Table.grid(padding=(0, 2, 0, 0))
        for justify in ("left", "right", "right", "right", "left"):
            table.add_column(justify=justify, no_wrap=True, style="dim")
        for line in self.workers():
            table.add_row(*line)
        return table

    def _maybe_replace(self, now: float) -> None:
        """Shows the latest statistics in the notebook, a few times a second."""
        if self._cell is not None and now - self._shown >= 1 / _PER_SECOND:
            self._shown = now
            self._cell.replace(self.render())

    def __enter__(self) -> CollectionProgress:
        if self._console.is_jupyter:
            from trawl.observe.notebook import CellOutput

            self._cell = CellOutput(self.render(), self._console.width)
        elif self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self.render,
                console=self._console,
                refresh_per_second=_PER_SECOND,
            )
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._cell is not None:
            self._cell.replace(self.render())
            self._cell = None
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._console.print()

    # --- elsewhere

    def _maybe_print(self, now: float, frames: int) -> None:
        then, before = self._printed
        total = self._total
        tenth = total is not None and frames * _LINES // total > before * _LINES // total
        if tenth or now - then >= _SECONDS:
            self._printed = now, frames
            line = "  ".join([self._count(), *self.figures()])
            self._console.print(Text(line), soft_wrap=True)


def _marks(now: float, frames: int) -> deque[tuple[float, int]]:
    """Returns a queue for recent pairs of time and frame count, with a first pair in it."""
    return deque([(now, frames)], maxlen=_RATE_BATCHES)


def _rate(marks: deque[tuple[float, int]]) -> float:
    (then, before), (now, frames) = marks[0], marks[-1]
    return (frames - before) / (now - then) if now > then else 0.0


def _whole_batches(facts: dict[str, Any]) -> int | None:
    """Returns ``total_frames`` rounded up to whole batches; None without a limit."""
    total, batch = facts.get("total_frames"), facts["requested_frames_per_batch"]
    return None if total is None else math.ceil(total / batch) * batch


def short(value: float) -> str:
    """Formats a number with about four digits.

    Example:
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

    Example:
        >>> plural(1, "batch"), plural(1200, "frame")
        ('1 batch', '1,200 frames')
    """
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}{ending}"
