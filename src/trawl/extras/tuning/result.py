"""Result of :func:`~trawl.tune`: a table, the best layout, and why it is the best."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trawl.extras.tuning.trial import Trial
from trawl.observe.formats import short

# Width of a table that is converted to text.
_WIDTH = 100


@dataclass(frozen=True)
class TuneResult:
    """Measured layouts, and the best one. ``print`` shows them as a table.

    Attributes:
        trials: results of all layouts: the measured ones, the fastest first, then the others.
        best: result of the recommended layout, the simplest of those that are at most 3 % slower
            than the fastest.
        options: arguments that select this layout: ``Collector(policy=policy, **result.options)``.
            They include ``create_env_fn`` and the options that were passed to ``tune``.
        code: Python code that makes the collector and collects a batch. The names
            ``policy``, ``make_policy`` and ``make_env`` stand for arguments that can't be written
            as text.
        why: sentences that explain the choice.
        seconds: duration of the search in seconds.

    Examples:
        >>> import trawl
        >>> result = trawl.tune("CartPole-v1", budget=2, max_envs=1, max_workers=1, progress=False)
        >>> print(result.code)
        from trawl import Collector
        collector = Collector('CartPole-v1', frames_per_batch=...)
        batch = collector.next()
    """

    trials: tuple[Trial, ...]
    best: Trial
    options: Mapping[str, Any]
    code: str
    why: str
    seconds: float

    @property
    def frames_per_second(self) -> float:
        """Frames per second of the best layout."""
        return self.best.frames_per_second

    def __rich__(self) -> Table:
        return _table(self.trials, self.best)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH, record=True, color_system=None)
        console.print(self)
        table = "\n".join(line.rstrip() for line in console.export_text().splitlines())
        return f"{table.strip()}\n\n{self.why}\n\n{self.code}"


def ordered(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Returns the measured trials, the fastest first, followed by the others."""
    return tuple(sorted(trials, key=lambda each: (not each.measured, -each.frames_per_second)))


def _table(trials: Sequence[Trial], best: Trial) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layout", style="cyan", no_wrap=True)
    for name in ("batch", "frames/s", "of best", "env time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for trial in trials:
        table.add_row(*map(Text, _row(trial, best)), style="bold" if trial is best else None)
    return table


def _row(trial: Trial, best: Trial) -> list[str]:
    candidate = trial.candidate
    row = [candidate.label, f"{candidate.frames_per_batch:,}"]
    if not trial.measured:
        return [*row, "", "", "", trial.error or "no time left to measure it"]
    share = trial.env_share
    return [
        *row,
        short(trial.frames_per_second),
        f"{trial.frames_per_second / best.frames_per_second:.0%}",
        "" if share is None else f"{share:.0%}",
        "chosen" if trial is best else "",
    ]
