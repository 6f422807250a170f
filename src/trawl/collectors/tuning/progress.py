"""Progress of a search, shown on a terminal or as lines."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from trawl.collectors.tuning.candidate import Candidate
from trawl.collectors.tuning.trial import Trial
from trawl.observe.formats import short


class TuneProgress:
    """Shows what is measured, and the fastest layout so far.

    On a terminal, the display is a bar that fills with the budget. Elsewhere, a line is printed
    for the first measurement of each layout.

    Args:
        budget: seconds for the search.
        console: console to print to; by default, the standard error stream.
    """

    def __init__(self, budget: float, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._budget = budget
        self._started = time.perf_counter()
        self._best: Trial | None = None
        self._printed: set[Candidate] = set()
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        # Refreshed only between measurements, so that no thread disturbs them.
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[best]}", markup=False),
            auto_refresh=False,
            transient=True,
            console=self._console,
        )
        self._task = self._bar.add_task("looking at the environment", total=budget, best="")

    def __enter__(self) -> TuneProgress:
        if self._live:
            self._bar.start()
            self._bar.refresh()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live:
            self._bar.stop()

    def update(self, event: Candidate | Trial) -> None:
        """Shows that a layout is measured now, or the result of a measurement."""
        if isinstance(event, Trial):
            self._note(event)
        if self._live:
            self._show(event.candidate if isinstance(event, Trial) else event)

    def _note(self, trial: Trial) -> None:
        best = self._best
        if trial.measured and (
            best is None
            or best.candidate == trial.candidate
            or trial.frames_per_second > best.frames_per_second
        ):
            self._best = trial
        if not self._live and trial.candidate not in self._printed:
            self._printed.add(trial.candidate)
            seconds = time.perf_counter() - self._started
            line = f"{seconds:5.1f} s  {trial.candidate.label}: {_result(trial)}"
            self._console.print(Text(line), soft_wrap=True)

    def _show(self, candidate: Candidate) -> None:
        best = self._best
        text = f"best: {best.candidate.label}, {_result(best)}" if best else ""
        passed = min(self._budget, time.perf_counter() - self._started)
        self._bar.update(self._task, completed=passed, description=candidate.label, best=text)
        self._bar.refresh()


def _result(trial: Trial) -> str:
    if not trial.measured:
        return trial.error or "not measured"
    size = trial.candidate.frames_per_batch
    return f"{short(trial.frames_per_second)} frames/s in batches of {size:,}"
