"""Reader that extracts an evaluation's episodes from a collector's batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from trawl.data.trajectories import join
from trawl.keys import MASK, REWARD, Key, as_key, show_key

# Key under which TorchRL's RewardSum writes the sum of the rewards so far.
EPISODE_REWARD = ("next", "episode_reward")


@dataclass(frozen=True)
class EvaluatedEpisodes:
    """The episodes of an evaluation, in the order of their numbers.

    Attributes:
        returns: return of each episode, float64: the sum of its rewards. With several agents, the
            mean of the agents' sums.
        lengths: number of steps of each episode, int64.
        seed: seed of the evaluation.
        groups: by group of agents, the mean of the agents' sums in each episode, float64.
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    seed: int
    groups: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.returns)


@dataclass
class _EnvEpisodes:
    """Episodes of one environment of the batch.

    Attributes:
        wanted: number of episodes that the environment contributes.
        returns: for each finished episode, the return of all agents, and that of each group.
        rewards: rows of the current episode, with the rewards of all agents, and of each group.
        frames: frames of the current episode, if frames are kept.
    """

    wanted: int
    returns: list[list[float]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rewards: list[Tensor] = field(default_factory=list)
    frames: list[TensorDictBase] = field(default_factory=list)
    trajectories: list[TensorDictBase] = field(default_factory=list)


class EpisodeReader:
    """Reads an equal number of episodes, give or take one, from each environment.

    Short episodes would be over-represented among the first episodes to end. Each environment
    therefore contributes a fixed number of episodes, and its later episodes are left out.

    Args:
        episodes: total number of episodes.
        reward_keys: keys of the rewards, which are averaged over all agents.
        done_key: key of the flags that mark the ends of episodes.
        keep: whether whole trajectories are kept.

    Raises:
        KeyError: if a batch lacks one of the keys.
    """

    def __init__(
        self, episodes: int, reward_keys: Sequence[Key], done_key: Any, keep: bool
    ) -> None:
        self.episodes = episodes
        self.reward_keys, self.done_key = tuple(reward_keys), as_key(done_key)
        grouped = (key[1:-1] if key[0] == "next" else key[:-1] for key in self.reward_keys)
        self._groups = ["/".join(path) for path in grouped if path]
        self.keep = keep
        self.frames = 0
        self._envs: list[_EnvEpisodes] = []

    @property
    def complete(self) -> bool:
        """True if all episodes have been read."""
        return bool(self._envs) and all(len(x.returns) >= x.wanted for x in self._envs)

    def add(self, batch: TensorDictBase) -> None:
        """Adds the episodes of a batch of shape ``(*environments, time)``."""
        steps = batch.shape[-1]
        num_envs = batch.shape[:-1].numel()
        if not self._envs:
            self._envs = [
                _EnvEpisodes(self.episodes // num_envs + (index < self.episodes % num_envs))
                for index in range(num_envs)
            ]
        rewards = self._rewards(batch).reshape(num_envs, steps, -1).cpu()
        done = self._get(batch, self.done_key).reshape(num_envs, steps, -1).any(-1).cpu()
        mask = batch.get(MASK, None)
        real = None if mask is None else mask.reshape(num_envs, steps).cpu()
        for index, env in enumerate(self._envs):
            if len(env.returns) < env.wanted:
                rows = torch.arange(steps) if real is None else real[index].nonzero().flatten()
                frames = batch.reshape(num_envs, steps)[index] if self.keep else None
                self._add_to(env, rewards[index], done[index], rows, frames)

    def _add_to(
        self,
        env: _EnvEpisodes,
        rewards: Tensor,
        done: Tensor,
        rows: Tensor,
        frames: TensorDictBase | None,
    ) -> None:
        ends = done[rows].nonzero().flatten().tolist()
        start = 0
        for end in [*ends, len(rows) - 1]:
            picked = rows[start : end + 1]
            if not len(picked):
                continue
            start = end + 1
            self.frames += len(picked)
            env.rewards.append(rewards[picked])
            if frames is not None:
                env.frames.append(frames[picked])
            if bool(done[picked[-1]]):
                self._end(env)
                if len(env.returns) == env.wanted:
                    return

    def _end(self, env: _EnvEpisodes) -> None:
        rewards = torch.cat(env.rewards)
        columns = rewards.T.contiguous()
        env.returns.append([float(one[-1] if self._sums else one.sum()) for one in columns])
        env.lengths.append(len(rewards))
        env.rewards = []
        if self.keep:
            env.trajectories.append(torch.cat(env.frames))
            env.frames = []

    def _rewards(self, batch: TensorDictBase) -> Tensor:
        """Returns the rewards of each row in float64, or TorchRL's running sums of rewards.

        The first column has the mean of all agents. The others have the mean of each group.
        """
        sums = batch.get(EPISODE_REWARD, None) if self.reward_keys == (REWARD,) else None
        self._sums = sums is not None
        given = [self._get(batch, key) for key in self.reward_keys] if sums is None else [sums]
        agents = [values.reshape(*batch.shape, -1).double() for values in given]
        columns = [torch.cat(agents, -1).mean(-1)]
        if self._groups:
            columns += [values.mean(-1) for values in agents]
        return torch.stack(columns, -1)

    def _get(self, batch: TensorDictBase, key: Any) -> Tensor:
        value = batch.get(key, None)
        if value is None:
            present = ", ".join(sorted(show_key(as_key(k)) for k in batch.keys(True, True)))
            raise KeyError(f"the batches have no {show_key(key)}; they have {present}")
        found: Tensor = value
        return found

    def result(self, seed: int) -> EvaluatedEpisodes:
        """Returns the episodes, in the order of their numbers."""
        returns = np.array(self._in_order([env.returns for env in self._envs]), np.float64)
        lengths = np.array(self._in_order([env.lengths for env in self._envs]), np.int64)
        own, *groups = np.ascontiguousarray(returns.T)
        return EvaluatedEpisodes(own, lengths, seed, dict(zip(self._groups, groups, strict=True)))

    def trajectories(self) -> TensorDictBase:
        """Returns the trajectories, padded to shape ``(episodes, longest)``.

        The entry ``("collector", "mask")`` is False in the padding.
        """
        found = self._in_order([env.trajectories for env in self._envs])
        # join() may replace the batches' mask, because add() left out rows that are not steps.
        return join(found, "padded")

    def _in_order(self, by_env: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns entries in the order of their episodes, which alternate between environments."""
        num_envs = len(by_env)
        return [by_env[number % num_envs][number // num_envs] for number in range(self.episodes)]
