"""Trajectory ids of batches with many environments, computed without a loop over them."""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import override

from trawl.keys import NO_TRAJECTORY
from trawl.memory import Array
from trawl.rollout.episodes import EpisodeTracker


class BatchEpisodeTracker(EpisodeTracker):
    """Record of the environments' trajectories that numbers a batch as a whole.

    Only :meth:`number` writes ids, and steps are counted elsewhere.

    Args:
        num_envs: number of environments.
    """

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, None)

    @override
    def number(self, done: Array, skipped: Array) -> Array:
        # In the order of the rows, each end takes the next id.
        ends = done & ~skipped
        rows, envs = ends.nonzero()
        current = np.asarray(self.ids, dtype=np.int64)
        first, count = self.next_id, len(rows)
        if not count:
            ids = np.broadcast_to(current, done.shape).copy()
        else:
            # In each row, the number of the latest end of an earlier row, from 1; 0 if none.
            latest = np.zeros((len(done) + 1, done.shape[1]), dtype=np.int64)
            latest[rows + 1, envs] = np.arange(1, count + 1)
            np.maximum.accumulate(latest, axis=0, out=latest)
            ids = np.where(latest > 0, first + (latest - 1) * self.stride, current)
            self.ids = ids[-1].tolist()
            self.next_id = first + count * self.stride
            ids = ids[:-1]
        ids[skipped] = NO_TRAJECTORY
        return ids

    def renew(self, mask: Any = None) -> None:
        """Begins new trajectories in all environments, or where ``mask`` is True."""
        for index in range(len(self.ids)) if mask is None else np.flatnonzero(mask):
            self.restart(int(index))
