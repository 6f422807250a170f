"""Measurement of one layout: frames per second that a collector delivers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from trawl.collectors.config import muted
from trawl.collectors.tuning.candidate import Candidate
from trawl.envs.generators import get_states, set_states

Clock = Callable[[], float]
Learner = Callable[[Any], Any]
# Batches that each asynchronous worker may have finished before the clock starts. As many are
# measured at least, because workers deliver in bursts.
_REQUESTS_PER_WORKER = 2


@dataclass(frozen=True)
class Measurement:
    """Findings from one trial of a layout.

    Attributes:
        frames: number of frames that were delivered in this time.
        seconds: seconds in which they were delivered, without the start of the processes.
        shares: shares of time from ``stats()``, such as ``env_share``, as far as there are any.
    """

    frames: int
    seconds: float
    shares: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Frames per second."""
        return self.frames / self.seconds

    def __add__(self, other: Measurement) -> Measurement:
        frames, seconds = self.frames + other.frames, self.seconds + other.seconds
        return Measurement(frames, seconds, _mean(self, other))


@dataclass(frozen=True)
class Trial:
    """Result of a layout.

    Attributes:
        candidate: the layout.
        frames_per_second: frames per second over all measurements; 0 if there are none. If the
            machine gets faster or slower during the search, the rates of all layouts are adjusted
            to the same conditions.
        seconds: duration of all measurements in seconds, without the start of processes.
        shares: mean shares of time over all measurements, such as ``env_share``.
        error: first line of the error with which the layout failed, or None.
    """

    candidate: Candidate
    frames_per_second: float = 0.0
    seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def measured(self) -> bool:
        """True if the layout was measured, and did not fail."""
        return self.error is None and self.seconds > 0

    @property
    def env_share(self) -> float | None:
        """Share of time that the environments take, from 0 to 1; None if it is unknown."""
        return self.shares.get("env_share", self.shares.get("env_time_share"))

    def add(self, found: Measurement) -> Trial:
        """Returns the result with one more measurement, at whose rate it stands for now."""
        return replace(
            self,
            frames_per_second=found.rate,
            seconds=self.seconds + found.seconds,
            shares=_mean(self, found),
        )

    def fail(self, error: BaseException) -> Trial:
        """Returns the result of a layout that raised an error."""
        return replace(self, frames_per_second=0.0, error=first_line(error))


def _mean(one: Measurement | Trial, other: Measurement) -> dict[str, float]:
    """Returns the mean shares of two measurements, weighted by their seconds."""
    if not (one.shares and other.shares):
        return one.shares or other.shares
    total = one.seconds + other.seconds
    return {
        name: (share * one.seconds + other.shares.get(name, share) * other.seconds) / total
        for name, share in one.shares.items()
    }


def first_line(error: BaseException) -> str:
    """Returns an error's type and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = type(error).__name__
    if not lines:
        return kind
    # An error from a worker begins with the worker and the type.
    return lines[0] if lines[0].startswith("in worker ") else f"{kind}: {lines[0]}"


def measure(
    make: Callable[[], Any],
    seconds: float,
    learner: Learner | None = None,
    clock: Clock = time.perf_counter,
) -> Measurement:
    """Makes a collector, and measures how many frames per second it delivers.

    The collector is closed before this function returns or raises. A few batches are measured,
    even if that takes longer than ``seconds``.

    Args:
        make: function that makes the collector.
        seconds: seconds for everything but closing the collector.
        learner: function that is called with each batch, or None.
        clock: function that returns the time in seconds.
    """
    began = clock()
    collector = make()
    try:

        def step() -> int:
            batch = collector.next()
            if learner is not None:
                learner(batch)
            return int(batch.numel())

        least = 1
        if not collector_is_sync(collector):
            least = _REQUESTS_PER_WORKER * collector.num_workers
        for _ in range(least):
            step()
        start, frames, batches = clock(), 0, 0
        while batches < least or clock() - began < seconds:
            frames += step()
            batches += 1
        # A clock may be too coarse for a single small batch.
        took = max(clock() - start, 1e-9)
        facts = collector.stats()
        shares = {
            name: float(value)
            for name, value in facts.items()
            if name.endswith("_share") and isinstance(value, float)
        }
        return Measurement(frames, took, shares)
    finally:
        collector.shutdown(raise_on_error=False)


def collector_is_sync(collector: Any) -> bool:
    """Returns True if no batch can be ready before it is asked for."""
    return bool(getattr(collector, "sync", True))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Mutes warnings about options, and restores the global random generators afterwards."""
    states = get_states()
    try:
        with muted():
            yield
    finally:
        set_states(states)
