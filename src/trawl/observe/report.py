"""A table of a collector's rates and shares of time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trawl.observe.bottleneck import bottleneck_of, driver_line
from trawl.observe.episodes import show_logged
from trawl.observe.formats import short, show_bytes
from trawl.observe.waits import WORKER_PARTS

_WIDTH = 100


class Report:
    """Table of a collector's rates and shares of time, followed by its bottleneck.

    ``print`` prints the table as text, and a console of ``rich`` prints it in color.

    Args:
        stats: statistics of a collector: ``stats("both")`` with workers, else ``stats()``.

    Examples:
        >>> from trawl import Collector
        >>> from trawl.observe import Report
        >>> with Collector("Pendulum-v1", frames_per_batch=100, total_frames=300) as collector:
        ...     for batch in collector:
        ...         pass
        ...     report = Report(collector.stats())
        >>> "limits the rate" in str(report)
        True
    """

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self.stats = dict(stats)

    def __str__(self) -> str:
        console = Console(width=_WIDTH, no_color=True, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())

    def __rich__(self) -> RenderableType:
        bottleneck = bottleneck_of(self.stats)
        if "env_share" not in self.stats:
            return Text(str(bottleneck))
        parts: list[RenderableType] = [self._table(), Text(self._driver()), Text(self._episodes())]
        logged = show_logged(self.stats)
        if logged:
            parts.append(Text(f"Logged: {logged}"))
        return Group(*parts, Text(str(bottleneck), style="bold"))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("", style="dim")
        for name in ("frames", "frames/s", *WORKER_PARTS, "restarts", "memory"):
            table.add_column(name, justify="right", no_wrap=True)
        for index in range(int(self.stats.get("workers", 0))):
            table.add_row(*self._row(f"worker {index}", f"worker_{index}/"))
        table.add_row(*self._row("all" if "workers" in self.stats else "collector", ""))
        return table

    def _row(self, title: str, prefix: str) -> list[str]:
        def of(name: str) -> Any:
            return self.stats.get(prefix + name)

        shares = [_show_share(of(f"{name}_share")) for name in WORKER_PARTS]
        rate, memory = of("frames_per_second"), of("process_bytes")
        return [
            title,
            f"{of('frames') or 0:,}",
            "-" if rate is None else short(rate),
            *shares,
            f"{of('restarts') or 0:,}",
            show_bytes(memory) if memory else "-",
        ]

    def _driver(self) -> str:
        text = driver_line(self.stats)
        if "workers" in self.stats:
            ready, depth = self.stats["batches_ready"], self.stats["queue_depth"]
            text += f"; {ready} batches ready, {depth} requested"
        return text

    def _episodes(self) -> str:
        count, value = self.stats["episodes"], self.stats["episode_return_mean"]
        text = f"Episodes: {count:,}"
        if math.isfinite(value):
            length = self.stats["episode_length_mean"]
            text += f", recent return {short(value)}, recent length {short(length)}"
        return text


def _show_share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
