"""Returns and lengths of episodes, summed up while batches are filled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trawl.memory import Array, Mask


class EpisodeSums:
    """Sums of the rewards and frames of each environment's current episode.

    Args:
        num_envs: number of environments.

    Attributes:
        ended: return and length of each episode that has ended, until :meth:`pop` removes them.
    """

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self.ended: list[tuple[float, int]] = []

    def add(self, rewards: Array, done: Mask, counted: Mask | None = None) -> None:
        """Adds a batch.

        Args:
            rewards: the rewards, ``(steps, num_envs)``.
            done: True where a step ended an episode, ``(steps, num_envs)``.
            counted: False where a step is no frame, ``(steps, num_envs)``; None if all are. Such a
                step is a reset, so an episode that goes on before it is dropped.
        """
        steps = len(done)
        if counted is None and not done.any():
            with np.errstate(invalid="ignore"):
                self._returns += rewards.sum(0, dtype=np.float64)
            self._lengths += steps
            return
        done = done.T.copy()
        last = done.copy() if counted is None else done | ~counted.T
        # The last step of each environment in the batch ends a run.
        last[:, -1] = True
        stops = last.reshape(-1).nonzero()[0]
        flat = None if counted is None else counted.T.reshape(-1)
        self._add_runs(stops // steps, stops, rewards.T.reshape(-1), done.reshape(-1), flat)

    def add_rows(self, envs: NDArray[Any], rewards: Array, done: Mask) -> None:
        """Adds frames that are sorted by environment, and for each environment by time.

        Args:
            envs: environment of each frame.
            rewards: reward of each frame.
            done: True where a frame ended an episode.
        """
        if len(envs):
            last = done.copy()
            last[-1] = True
            last[:-1] |= envs[1:] != envs[:-1]
            stops = last.nonzero()[0]
            self._add_runs(envs[stops], stops, rewards, done, None)

    def _add_runs(
        self,
        owners: NDArray[Any],
        stops: NDArray[Any],
        rewards: Array,
        done: Mask,
        counted: Mask | None,
    ) -> None:
        """Adds runs, which are series of steps that belong to one episode.

        Args:
            owners: environment of each run; runs of one environment follow each other.
            stops: index of the last step of each run.
            rewards: reward of each step.
            done: True where a step ended an episode.
            counted: False where a step is no frame; None if all are.
        """
        starts = np.zeros_like(stops)
        starts[1:] = stops[:-1] + 1
        edges = np.ones(len(stops) + 1, np.bool_)
        np.not_equal(owners[1:], owners[:-1], out=edges[1:-1])
        first, final = edges[:-1].nonzero()[0], edges[1:].nonzero()[0]
        over = whole = done[stops]
        lengths = stops - starts + 1
        if counted is not None:
            rewards = np.where(counted, rewards, 0)
            lengths = np.add.reduceat(counted, starts, dtype=np.int64)
            over, whole = whole | ~counted[stops], whole & counted[stops]
        # Rewards may be infinite.
        with np.errstate(invalid="ignore"):
            returns = np.add.reduceat(rewards, starts, dtype=np.float64)
            returns[first] += self._returns[owners[first]]
        lengths[first] += self._lengths[owners[first]]
        kept, going = owners[final], ~over[final]
        self._returns[kept] = np.where(going, returns[final], 0)
        self._lengths[kept] = lengths[final] * going
        self.ended += zip(returns[whole].tolist(), lengths[whole].tolist(), strict=True)

    def reset(self, mask: Mask | None = None) -> None:
        """Begins new episodes in all environments, or where ``mask`` is True."""
        chosen = slice(None) if mask is None else mask
        self._returns[chosen] = 0
        self._lengths[chosen] = 0

    def pop(self) -> list[tuple[float, int]]:
        """Removes and returns the episodes that have ended."""
        ended, self.ended = self.ended, []
        return ended

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of the current episodes."""
        return {"returns": self._returns.tolist(), "lengths": self._lengths.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned."""
        self._returns[:] = state["returns"]
        self._lengths[:] = state["lengths"]
