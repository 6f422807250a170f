"""Times that the inner loop measures."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

# Number of steps of a batch of which a StepRecorder keeps the times.
_STEPS = 1024


@dataclass
class LoopTimes:
    """Time that batches have spent in the environment, in the policy, and with new weights.

    The loop times a few steps of each chunk. The whole time of the loop is divided in the same
    proportion.

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

    def add(self, began: float, ended: float, acting: float, stepping: float) -> None:
        """Adds the times of a batch.

        Args:
            began: time at which the first step began.
            ended: time at which the last step ended.
            acting: seconds of the policy's part of the timed steps.
            stepping: seconds of the environment's part of the timed steps.
        """
        self.began, self.ended = began, ended
        if not acting + stepping:
            # A batch that was interrupted after its first step is divided like the others.
            acting, stepping = self.policy, self.env
        timed = acting + stepping
        if timed:
            self.env += (ended - began) * stepping / timed
            self.policy += (ended - began) * acting / timed


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
