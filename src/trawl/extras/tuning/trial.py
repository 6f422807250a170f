"""Measurement of one layout: frames per second that a collector delivers."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from trawl.collectors.config import muted
from trawl.collectors.single import Collector
from trawl.envs.build import is_env, refuse_policy
from trawl.envs.generators import get_states, set_states
from trawl.envs.types import is_list
from trawl.extras.tuning.candidate import Candidate

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


# Seconds and batches after which a probe ends.
_SECONDS = 0.2
_BATCHES = 2


@dataclass(frozen=True)
class Probe:
    """Findings from a few steps of one environment.

    Attributes:
        seconds_per_frame: wall-clock time of a frame, an upper bound.
        env_batch: number of environments that the source makes at once; 0 for a single one.
        waits: True if the process spent more time waiting, for anything but a processor, than
            running.
    """

    seconds_per_frame: float
    env_batch: int
    waits: bool


def probe(source: Any, policy: Any, options: Mapping[str, Any]) -> Probe:
    """Steps one environment a few times.

    Args:
        source: the source of one environment.
        policy: the policy, or None.
        options: options of the collector.

    Raises:
        Exception: any error of the environment, the policy or the options.
    """
    with Collector(source, policy, frames_per_batch=1, **options) as collector:
        collector.next()
        start, (ran, queued) = time.perf_counter(), processor_seconds()
        frames = batches = 0
        while batches < _BATCHES or time.perf_counter() - start < _SECONDS:
            batch = collector.next()
            assert batch is not None
            frames += batch.numel()
            batches += 1
        wall, after = time.perf_counter() - start, processor_seconds()
        size: Sequence[int] = collector.env.batch_size
        return Probe(
            seconds_per_frame=wall / frames,
            env_batch=math.prod(size) if size else 0,
            waits=mostly_waits(wall, after[0] - ran, after[1] - queued),
        )


def mostly_waits(wall: float, ran: float, queued: float) -> bool:
    """Returns True if a process waited, for anything but a processor, for longer than it ran.

    Args:
        wall: seconds that passed.
        ran: seconds for which the process ran.
        queued: seconds for which it waited for a processor.

    Examples:
        >>> mostly_waits(1.0, ran=0.1, queued=0.0), mostly_waits(1.0, ran=0.1, queued=0.9)
        (True, False)
    """
    return wall - ran - queued > ran


def processor_seconds() -> tuple[float, float]:
    """Returns the seconds for which this process ran, and waited for a processor to run on."""
    # Other threads of the environment run as well.
    ran = time.process_time()
    try:
        _, queued, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
        return ran, int(queued) / 1e9
    except (OSError, ValueError):  # only Linux has this file
        return ran, 0.0


def check_source(source: Any, purpose: str) -> None:
    """Rejects a source from which environments can't be made repeatedly.

    Args:
        source: the argument ``create_env_fn``.
        purpose: name of the function or option that makes the environments.

    Raises:
        TypeError: if the source is a list, an existing environment or a policy.
    """
    refuse_policy(source)
    if is_list(source):
        raise TypeError(
            f"{purpose} needs the source of one environment, but create_env_fn is a list of "
            f"{len(source)}: pass a Gymnasium id, or a function that makes an environment"
        )
    if is_env(source):
        raise TypeError(
            f"{purpose} makes environments repeatedly, but create_env_fn is an existing "
            f"environment: {source!r}. Pass a Gymnasium id, or a function that makes it"
        )


def own_copy(policy: Any) -> Any:
    """Returns a copy of a module, so that trials leave no trace in it; other policies as they are.

    A module that can't be copied is returned as well.
    """
    if not isinstance(policy, nn.Module):
        return policy
    try:
        return copy.deepcopy(policy)
    except Exception:
        return policy
