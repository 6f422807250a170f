"""Times that the inner loop measures."""

from __future__ import annotations

from dataclasses import dataclass


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
        timed = acting + stepping
        if timed:
            self.env += (ended - began) * stepping / timed
            self.policy += (ended - began) * acting / timed
