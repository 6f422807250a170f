"""Trajectory ids of batches with many environments, written row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from trawl.keys import NO_TRAJECTORY
from trawl.memory import Array, Mask
from trawl.rollout.episodes import EpisodeTracker


class BatchEpisodeTracker(EpisodeTracker):
    """Record of the environments' trajectories that numbers a batch as a whole.

    Only :meth:`number` and :meth:`write` write ids, and steps are counted elsewhere.

    Args:
        num_envs: number of environments.
    """

    ids: Array

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, None)
        self.ids = np.arange(num_envs)

    @override
    def number(self, done: Mask, skipped: Mask | None = None, cut: bool = False) -> Array:
        ids = np.empty(done.shape, dtype=np.int64)
        self.write(ids, done, skipped, cut)
        return ids

    def write(self, ids: Array, done: Mask, skipped: Mask | None = None, cut: bool = False) -> None:
        """Writes the trajectory ids of a batch; in the order of the rows, each end takes the next.

        Args:
            ids: array to write to, ``(steps, num_envs)``.
            done: True where a step ended an episode, ``(steps, num_envs)``.
            skipped: True where a step is not experience; None if all steps are.
            cut: True if the episodes of the batch before end with the first row, which is skipped.
        """
        ends = done if skipped is None else done & ~skipped
        if cut:
            ends[0] = True
            for index in range(len(self.ids)):
                self.cut(index)
        current, start = self.ids, 0
        for row in np.flatnonzero(ends.any(1)).tolist():
            ids[start : row + 1] = current
            envs = ends[row].nonzero()[0]
            stop = self.next_id + len(envs) * self.stride
            current[envs] = range(self.next_id, stop, self.stride)
            self.next_id, start = stop, row + 1
        ids[start:] = current
        if skipped is not None:
            ids[skipped] = NO_TRAJECTORY

    def renew(self, mask: Any = None) -> None:
        """Begins new trajectories in all environments, or where ``mask`` is True."""
        for index in range(len(self.ids)) if mask is None else np.flatnonzero(mask):
            self.restart(int(index))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ids": self.ids.tolist()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.ids = np.array(state["ids"], np.int64)
