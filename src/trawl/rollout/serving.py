"""Options and record of a policy's calls for environments that step each at its own pace."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from trawl.keys import ENV_INDEX, Key

# Number of recent calls whose times are kept.
_WINDOW = 1024


@dataclass(frozen=True)
class Batching:
    """Sizes of the batches for which the policy acts.

    Attributes:
        least: number of ready environments that the policy waits for.
        most: maximum number of environments for which the policy acts at once.
        patience: seconds after the first ready environment in which the others are waited for.
        size: number of rows in each batch that the policy gets, filled up with copies of the last
            row; None for no filling.
    """

    least: int
    most: int
    patience: float
    size: int | None


@dataclass(frozen=True)
class ServingOptions:
    """Options for acting in environments that are ready.

    Attributes:
        batching: sizes of the batches for which the policy acts.
        version_key: key of the policy version in the frames; None to leave it out.
        max_lag: maximum number of updates by which a frame may be behind when it is delivered;
            None for no limit.
        cores: CPU cores on which the policy acts; None for all.
        ends_idle: True to begin no step whose frame has no room in the batch, because all
            environments are reset before the next one.
    """

    batching: Batching
    version_key: Key | None = None
    max_lag: int | None = None
    cores: Sequence[int] | None = None
    ends_idle: bool = False


@contextmanager
def running_on(cores: Sequence[int] | None) -> Iterator[None]:
    """Context in which this thread runs on some cores only; None for no change."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class ServingRecord:
    """Counts and times of a policy's calls.

    Attributes:
        calls: number of calls.
        frames: number of environments for which the policy acted, in all calls.
        waited: seconds in which no environment was ready.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins a new record."""
        self.calls = self.frames = 0
        self.waited = self._acted = 0.0
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._began = perf_counter()

    def add(self, frames: int, seconds: float) -> None:
        """Adds a call for ``frames`` environments that took ``seconds``."""
        self.calls += 1
        self.frames += frames
        self._acted += seconds
        self._times.append(seconds)

    def describe(self) -> dict[str, Any]:
        """Returns the record, under the names that a collector's ``server_stats()`` uses."""
        elapsed = max(perf_counter() - self._began, 1e-9)
        middle, high = np.percentile(self._times, (50, 95)) * 1e3 if self._times else (0.0, 0.0)
        return {
            "requests": self.frames,
            "batches": self.calls,
            "requests_per_s": self.frames / elapsed,
            "batches_per_s": self.calls / elapsed,
            "avg_batch_size": self.frames / self.calls if self.calls else 0.0,
            "p50_forward_ms": float(middle),
            "p95_forward_ms": float(high),
            "forward_share": self._acted / elapsed,
            "wait_share": self.waited / elapsed,
        }


def by_environment(frames: TensorDictBase) -> list[tuple[int, TensorDictBase]]:
    """Returns the frames of each environment, with its number, if frames have such numbers.

    Otherwise, all frames are returned together, with the number 0.
    """
    index = frames.get(ENV_INDEX, None)
    if index is None:
        return [(0, frames)]
    return [(int(env), frames[index == env]) for env in index.unique()]
