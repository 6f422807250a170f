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
        steps, num_envs = done.shape
        if counted is None and not done.any():
            with np.errstate(invalid="ignore"):
                self._returns += rewards.sum(0, dtype=np.float64)
            self._lengths += steps
            return
        envs = np.repeat(np.arange(num_envs), steps)
        flat = None if counted is None else counted.T.reshape(-1)
        self.add_rows(envs, rewards.T.reshape(-1), done.T.reshape(-1), flat)

    def add_rows(
        self, envs: NDArray[Any], rewards: Array, done: Mask, counted: Mask | None = None
    ) -> None:
        """Adds steps that are sorted by environment, and for each environment by time.

        Args:
            envs: environment of each step.
            rewards: reward of each step.
            done: True where a step ended an episode.
            counted: False where a step is no frame; None if all are.
        """
        if not len(envs):
            return
        values, frames = rewards.astype(np.float64), np.ones(len(envs), np.int64)
        last = done
        if counted is not None:
            values, frames = np.where(counted, values, 0.0), counted.astype(np.int64)
            last = done | ~counted
        # A run is a series of steps that belong to one episode.
        starts = np.flatnonzero(np.r_[True, last[:-1] | (envs[1:] != envs[:-1])])
        stops = np.r_[starts[1:], len(envs)] - 1
        owners = envs[starts]
        first = np.r_[True, owners[1:] != owners[:-1]]
        # Rewards may be infinite.
        with np.errstate(invalid="ignore"):
            returns = np.add.reduceat(values, starts)
            returns[first] += self._returns[owners[first]]
        lengths = np.add.reduceat(frames, starts)
        lengths[first] += self._lengths[owners[first]]
        self._carry_over(owners, returns, lengths, over=last[stops])
        whole = done[stops] if counted is None else done[stops] & counted[stops]
        self.ended += zip(returns[whole].tolist(), lengths[whole].tolist(), strict=True)

    def _carry_over(self, owners: NDArray[Any], returns: Array, lengths: Array, over: Mask) -> None:
        """Keeps the sums of each environment's last run, or zeros if its episode is over."""
        final = np.r_[owners[1:] != owners[:-1], True]
        self._returns[owners[final]] = np.where(over[final], 0.0, returns[final])
        self._lengths[owners[final]] = np.where(over[final], 0, lengths[final])

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
