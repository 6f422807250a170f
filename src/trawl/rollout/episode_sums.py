"""Returns and lengths of episodes, summed up while batches are filled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trawl.memory import Array, Mask

#: Number of most recent episodes whose returns and lengths are kept.
WINDOW = 100
# Largest number of steps that are added without arrays. Arrays cost less for each step, but a call
# of numpy takes microseconds if its code is not in the processor's cache. An environment costs as
# much as further steps.
_FEW, _STEPS_PER_ENV = 2048, 16
# Number of environments from which a batch is added row by row, which needs no transposed copies.
_MANY = 1024


class EndedEpisodes(NamedTuple):
    """Episodes that have ended.

    Attributes:
        number: number of episodes.
        returns: returns of the most recent episodes, at most ``WINDOW``.
        lengths: lengths of the same episodes.
    """

    number: int = 0
    returns: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()


NO_EPISODES = EndedEpisodes()


class EpisodeSums:
    """Sums of the rewards and frames of each environment's current episode.

    Args:
        num_envs: number of environments.

    Attributes:
        count: number of episodes that have ended.
        frames: number of frames of these episodes.
    """

    def __init__(self, num_envs: int) -> None:
        self.count = self.frames = 0
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._popped = 0
        # Plain numbers in two lists, because many tuples would make Python look for garbage.
        self._ended: tuple[list[float], list[int]] = ([], [])

    def add(
        self, rewards: Array, done: Mask, counted: Mask | None = None, most: float = math.inf
    ) -> None:
        """Adds a batch.

        Args:
            rewards: the rewards, ``(steps, num_envs)``.
            done: True where a step ended an episode, ``(steps, num_envs)``.
            counted: False where a step is no frame, ``(steps, num_envs)``; None if all are. Such a
                step begins a new episode. If it was a reset, the episode before it has ended; if it
                was a failure, the episode ends with the step before.
            most: number of frames, step by step, that are delivered at most. Episodes that end in
                later frames are not counted.
        """
        if most < done.size:
            frames = np.ones(done.shape, np.bool_) if counted is None else counted
            done = done & (frames.reshape(-1).cumsum().reshape(done.shape) <= most)
        steps = len(done)
        if counted is None and done.size == 1 and not done.item():
            # Plain numbers take a quarter of the time, and don't warn of infinite ones.
            self._returns[0] = self._returns.item() + rewards.item()
            self._lengths[0] = self._lengths.item() + 1
            return
        if counted is None and not np.count_nonzero(done):
            with np.errstate(invalid="ignore"):
                self._returns += rewards.sum(0, dtype=np.float64)
            self._lengths += steps
            return
        if counted is None and (steps + _STEPS_PER_ENV) * done.shape[1] <= _FEW:
            self._add_few(rewards, done)
            return
        if counted is None and done.shape[1] >= _MANY:
            self._add_many(rewards, done)
            return
        done = done.T.copy()
        last = done.copy() if counted is None else done | ~counted.T
        # The last step of each environment in the batch ends a run.
        last[:, -1] = True
        stops = last.reshape(-1).nonzero()[0]
        owners = stops // steps
        flat = None if counted is None else counted.T.reshape(-1)
        times = stops - owners * steps
        self._add_runs(owners, stops, times, rewards.T.reshape(-1), done.reshape(-1), flat)

    def _add_few(self, rewards: Array, done: Mask) -> None:
        """Adds a small batch, in which all steps count, with few calls of numpy."""
        returns, lengths = self._returns.tolist(), self._lengths.tolist()
        values, begun = rewards.T.tolist(), [0] * len(returns)
        rows, envs = done.nonzero()
        ended_returns, ended_lengths = self._ended
        for row, env in zip(rows.tolist(), envs.tolist(), strict=True):
            start, stop = begun[env], row + 1
            ended_returns.append(returns[env] + sum(values[env][start:stop]))
            ended_lengths.append(lengths[env] + stop - start)
            self.frames += ended_lengths[-1]
            returns[env], lengths[env], begun[env] = 0.0, 0, stop
        self.count += len(rows)
        self._trim()
        for env, start in enumerate(begun):
            returns[env] += sum(values[env][start:])
            lengths[env] += len(done) - start
        self._returns[:], self._lengths[:] = returns, lengths

    def _add_many(self, rewards: Array, done: Mask) -> None:
        """Adds a batch of many environments, in which all steps count."""
        start, returns, lengths = 0, self._returns, self._lengths
        found: list[tuple[Array, Array]] = []
        # Rewards may be infinite.
        with np.errstate(invalid="ignore"):
            for row in np.flatnonzero(done.any(1)).tolist():
                if row > start:
                    returns += rewards[start:row].sum(0, dtype=np.float64)
                returns += rewards[row]
                envs, start = done[row].nonzero()[0], row + 1
                found.append((returns[envs], lengths[envs] + start))
                self.frames += int(found[-1][1].sum())
                # The steps of the whole batch are added to all lengths at its end.
                returns[envs], lengths[envs] = 0, -start
            returns += rewards[start:].sum(0, dtype=np.float64)
        lengths += len(done)
        self.count += sum(len(ended) for ended, _ in found)
        for ended_returns, ended_lengths in found[-WINDOW:]:
            self._ended[0].extend(ended_returns[-WINDOW:].tolist())
            self._ended[1].extend(ended_lengths[-WINDOW:].tolist())
        self._trim()

    def add_rows(self, envs: NDArray[Any], rewards: Array, done: Mask) -> None:
        """Adds frames in the order in which they were collected.

        Args:
            envs: environment of each frame.
            rewards: reward of each frame.
            done: True where a frame ended an episode.
        """
        if not len(envs):
            return
        order = np.argsort(envs, kind="stable")
        envs, rewards, done = envs[order], rewards[order], done[order]
        last = done.copy()
        last[-1] = True
        last[:-1] |= envs[1:] != envs[:-1]
        stops = last.nonzero()[0]
        self._add_runs(envs[stops], stops, order[stops], rewards, done, None)

    def _add_runs(
        self,
        owners: NDArray[Any],
        stops: NDArray[Any],
        times: NDArray[Any],
        rewards: Array,
        done: Mask,
        counted: Mask | None,
    ) -> None:
        """Adds runs, which are series of steps that belong to one episode.

        Args:
            owners: environment of each run; runs of one environment follow each other.
            stops: index of the last step of each run.
            times: numbers that order the ends of the runs in time.
            rewards: reward of each step.
            done: True where a step ended an episode.
            counted: False where a step is no frame; None if all are.
        """
        starts = np.zeros_like(stops)
        starts[1:] = stops[:-1] + 1
        edges = np.ones(len(stops) + 1, np.bool_)
        np.not_equal(owners[1:], owners[:-1], out=edges[1:-1])
        first, final = edges[:-1].nonzero()[0], edges[1:].nonzero()[0]
        over = done[stops]
        lengths = stops - starts + 1
        if counted is not None:
            rewards = np.where(counted, rewards, 0)
            lengths = np.add.reduceat(counted, starts, dtype=np.int64)
            over = over | ~counted[stops]
        # Rewards may be infinite.
        with np.errstate(invalid="ignore"):
            returns = np.add.reduceat(rewards, starts, dtype=np.float64)
            returns[first] += self._returns[owners[first]]
        lengths[first] += self._lengths[owners[first]]
        kept, going = owners[final], ~over[final]
        self._returns[kept] = np.where(going, returns[final], 0)
        self._lengths[kept] = lengths[final] * going
        ended = (over & (lengths > 0)).nonzero()[0]
        self.count += len(ended)
        self.frames += int(lengths[ended].sum())
        newest = ended[np.argsort(times[ended], kind="stable")[-WINDOW:]]
        self._ended[0].extend(returns[newest].tolist())
        self._ended[1].extend(lengths[newest].tolist())
        self._trim()

    def _trim(self) -> None:
        for values in self._ended:
            del values[:-WINDOW]

    def end(self, env: int) -> None:
        """Ends the current episode of an environment with its last frame, if it has any."""
        if self._lengths[env]:
            self.count += 1
            self.frames += int(self._lengths[env])
            self._ended[0].append(float(self._returns[env]))
            self._ended[1].append(int(self._lengths[env]))
            self._trim()
            self._returns[env] = self._lengths[env] = 0

    def reset(self, mask: Mask | None = None) -> None:
        """Begins new episodes in all environments, or where ``mask`` is True."""
        chosen = slice(None) if mask is None else mask
        self._returns[chosen] = 0
        self._lengths[chosen] = 0

    @property
    def unfinished(self) -> int:
        """Number of frames of the current episodes."""
        lengths = self._lengths
        return int(lengths.item() if lengths.size == 1 else lengths.sum())

    def pop(self) -> EndedEpisodes:
        """Removes and returns the episodes that have ended since the last call."""
        number, self._popped = self.count - self._popped, self.count
        if not number:
            return NO_EPISODES
        ended = EndedEpisodes(number, tuple(self._ended[0]), tuple(self._ended[1]))
        for values in self._ended:
            values.clear()
        return ended

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of the current episodes."""
        return {"returns": self._returns.tolist(), "lengths": self._lengths.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned."""
        self._returns[:] = state["returns"]
        self._lengths[:] = state["lengths"]
