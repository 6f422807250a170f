"""Limit to the age of frames from environments that step each at its own pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

# Number of recent batches for each of which the number of updates before it is kept.
_REMEMBERED = 256


class LagLimit:
    """Keeps frames from being delivered with actions of too old a policy.

    While a batch is filled, rows are kept free for frames that would be too old in a later batch.
    The policy chooses no action whose frame could not be delivered in time. The limit counts the
    updates between recent batches, and assumes that the learner sends no more than the largest of
    these counts between two batches. Until the learner has sent updates, it assumes ``most``
    updates, but at least one.

    Args:
        most: maximum number of updates by which a frame may be behind when it is delivered.
        rows: number of rows of a batch.
        processes: number of processes, each of which has one environment.
        version: function that returns the policy's current version.
    """

    def __init__(self, most: int, rows: int, processes: int, version: Callable[[], int]) -> None:
        self._most, self._rows, self._version = most, rows, version
        self._seen: deque[int] = deque([0], maxlen=_REMEMBERED)
        self._now = version()
        # Whether an environment has an action, but its frame is not recorded; and the version of
        # the policy that chose the action.
        self._open = np.zeros(processes, np.bool_)
        self._chosen = np.zeros(processes, np.int64)

    @property
    def _step(self) -> int:
        """Number of updates that are expected until the next batch."""
        return max(self._seen) or max(1, self._most)

    def begin(self) -> None:
        """Notes the beginning of a batch."""
        now = self._version()
        if self._open.any():
            self._seen.append(max(0, now - self._now))
        self._now = now

    def to_act_for(self, processes: list[int], room: int) -> int:
        """Returns for how many of the processes the policy may act now.

        Args:
            processes: processes that wait for actions.
            room: number of rows that are left in the batch.
        """
        later = self._most // self._step * self._rows
        return min(len(processes), max(0, room + later - int(self._open.sum())))

    def acted(self, processes: Sequence[int]) -> None:
        """Notes that the policy has acted for some processes."""
        self._open[processes] = True
        self._chosen[processes] = self._version()

    def recorded(self, process: int) -> None:
        """Notes that the frame of a process is recorded, or dropped."""
        self._open[process] = False

    def keep(self, processes: Sequence[int]) -> None:
        """Notes that all frames are dropped, except those of some processes."""
        kept = self._open[processes]
        self._open[:] = False
        self._open[processes] = kept

    def slack(self, process: int) -> int:
        """Returns the number of batches that the frame of a process may wait for its delivery."""
        return int(self._slack(self._chosen[process]))

    def may_record(self, process: int, room: int) -> bool:
        """Returns True if all frames that may wait less than this one can still be in time.

        Args:
            process: process whose frame is to be recorded.
            room: number of rows that are left in the batch.
        """
        slack = self.slack(process)
        if not slack:
            return True
        waiting = self._slack(self._chosen[self._open])
        # Number of frames that must be delivered in this batch, up to the next batch, and so on.
        needed = np.bincount(waiting, minlength=slack).cumsum()[:slack]
        return bool((needed < room + np.arange(slack) * self._rows).all())

    def state_dict(self) -> dict[str, Any]:
        """Returns the record of updates, and of the frames that are not recorded yet."""
        return {
            "seen": list(self._seen),
            "now": self._now,
            "open": self._open.tolist(),
            "chosen": self._chosen.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned."""
        self._seen = deque(state["seen"], maxlen=_REMEMBERED)
        self._now = state["now"]
        self._open[:], self._chosen[:] = state["open"], state["chosen"]

    def _slack(self, chosen: Any) -> Any:
        return np.maximum(0, (self._most - (self._now - chosen)) // self._step)


def lag_limit(
    most: int | None, steps: int, rows: Sequence[Sized], version: Callable[[], int]
) -> LagLimit | None:
    """Returns the limit for batches of ``steps`` rows; None if there is no limit.

    Args:
        most: maximum number of updates by which a frame may be behind, or None.
        steps: number of rows of a batch.
        rows: rows of the environments of each process.
        version: function that returns the policy's current version.

    Raises:
        ValueError: if a process has several environments.
    """
    if most is None:
        return None
    each = max(map(len, rows))
    if each > 1:
        raise ValueError(
            f"max_policy_lag={most} needs processes with one environment each, but each has "
            f"{each}: leave out envs_per_worker or max_policy_lag"
        )
    return LagLimit(most, steps, len(rows), version)
