"""Times that the inner loop measures.

The loop times a few steps of each chunk, and divides its whole time between environment and policy
in the same proportion. All other times need only a few readings of the clock per batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Number of steps of a batch of which a StepRecorder keeps the times.
_STEPS = 1024


@dataclass
class LoopTimes:
    """Time that batches have spent in the environment, in the policy, and with new weights.

    Attributes:
        began: time of ``time.perf_counter()`` at which the last batch's first step began.
        ended: time at which the last batch's last step ended.
        env: seconds in the environment, in all batches.
        policy: seconds in the policy, in all batches.
        weights: seconds in which new weights were loaded, in all batches.
    """

    began: float = 0.0
    ended: float = 0.0
    env: float = 0.0
    policy: float = 0.0
    weights: float = 0.0

    @property
    def env_share(self) -> float:
        """Share of the time in the environment and the policy that the environment takes."""
        total = self.env + self.policy
        return self.env / total if total else 0.0

    def add(self, seconds: float, acting: float) -> None:
        """Adds the steps of a batch, or some of them.

        Args:
            seconds: seconds that the steps took.
            acting: seconds of these in the policy; the rest counts for the environment.
        """
        acting = min(acting, seconds)
        self.policy += acting
        self.env += seconds - acting


def estimated_sum(samples: Sequence[float], count: int) -> float:
    """Returns the estimated sum of ``count`` durations, of which only the first were measured.

    The first duration is often longer than the others, so it does not stand for any of them.

    Args:
        samples: measured durations, in seconds.
        count: number of all durations.

    Examples:
        >>> estimated_sum([5.0, 1.0, 2.0], count=11)
        20.0
    """
    first, others = sum(samples[:1]), samples[1:]
    missing = count - len(samples)
    return first + sum(others) + (missing * sum(others) / len(others) if others else 0.0)


class StepSamples(NamedTuple):
    """Times of single steps, as values of ``time.perf_counter()``.

    Attributes:
        times: for each step, the times at which the policy and the environment began, and the time
            at which the environment ended.
        dropped: number of earlier steps that were dropped.
    """

    times: list[tuple[float, float, float]]
    dropped: int


class StepRecorder:
    """Ring buffer for the times of single steps; drops the oldest when it is full.

    Args:
        size: number of steps that it holds.
    """

    def __init__(self, size: int = _STEPS) -> None:
        self._times: deque[tuple[float, float, float]] = deque(maxlen=size)
        self._added = 0

    def add(self, began: float, between: float, ended: float) -> None:
        """Adds a step.

        Args:
            began: time at which the policy began.
            between: time at which the environment began.
            ended: time at which the environment ended.
        """
        self._added += 1
        self._times.append((began, between, ended))

    def pop(self) -> StepSamples:
        """Removes and returns all steps since the last call."""
        found = StepSamples(list(self._times), self._added - len(self._times))
        self._times.clear()
        self._added = 0
        return found
