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
            # Each environment's ends, one environment after another.
            order = np.argsort(envs, kind="stable")
            rows, envs = rows[order], envs[order]
            begun = first + order * self.stride
            # Numbers of the trajectories of an environment, and the rows in which they begin.
            per_env = np.bincount(envs, minlength=len(current))
            at = np.cumsum(per_env) - per_env + np.arange(len(current))
            numbers = np.empty(count + len(current), dtype=np.int64)
            starts = np.zeros_like(numbers)
            later = np.ones(len(numbers), dtype=np.bool_)
            later[at] = False
            numbers[at], numbers[later] = current, begun
            starts[later] = rows + 1
            stops = np.full_like(starts, len(done))
            stops[:-1][later[1:]] = starts[1:][later[1:]]
            ids = np.repeat(numbers, stops - starts).reshape(len(current), len(done)).T
            self.ids = numbers[at + per_env].tolist()
            self.next_id = first + count * self.stride
        ids[skipped] = NO_TRAJECTORY
        return ids

    def renew(self, mask: Any = None) -> None:
        """Begins new trajectories in all environments, or where ``mask`` is True."""
        for index in range(len(self.ids)) if mask is None else np.flatnonzero(mask):
            self.restart(int(index))
