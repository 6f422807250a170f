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
        truncated: True for each episode that was truncated.
        env_index: index of the environment of each episode, int64.
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    seed: int
    groups: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    truncated: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    env_index: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.returns)


@dataclass
class _EnvEpisodes:
    """Episodes of one environment of the batch.

    Attributes:
        wanted: number of episodes that the environment contributes.
        ends: for each finished episode, the number of its last row, over all batches.
        truncated: for each finished episode, whether it was truncated.
        returns: for each finished episode, the return of all agents, and that of each group.
        rewards: rows of the current episode, with the rewards of all agents, and of each group.
        frames: frames of the current episode, if frames are kept.
    """

    wanted: int
    ends: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    returns: list[list[float]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rewards: list[Tensor] = field(default_factory=list)
    frames: list[TensorDictBase] = field(default_factory=list)
    trajectories: list[TensorDictBase] = field(default_factory=list)


class EpisodeReader:
    """Reads episodes from the batches of an evaluation.

    By default, each environment contributes an equal number of episodes, give or take one, and its
    later episodes are left out. Otherwise, the first episodes that end count. Short episodes are
    over-represented among these.

    Args:
        episodes: total number of episodes.
        reward_keys: keys of the rewards, which are averaged over all agents.
        done_key: key of the flags that mark the ends of episodes.
        keep: whether whole trajectories are kept.
        per_env: whether each environment contributes its share; otherwise, the first episodes that
            end count.
        in_rounds: whether the environments begin their episodes together: after its episode, an
            environment contributes nothing until :meth:`begin_round`.

    Raises:
        KeyError: if a batch lacks one of the keys.
    """

    def __init__(
        self,
        episodes: int,
        reward_keys: Sequence[Key],
        done_key: Any,
        keep: bool,
        per_env: bool = True,
        in_rounds: bool = False,
    ) -> None:
        self.per_env = per_env
        self._round = 1 if in_rounds else episodes
        self._rows = 0  # number of rows in all batches
        self.episodes = episodes
        self.reward_keys, self.done_key = tuple(reward_keys), as_key(done_key)
        grouped = (key[1:-1] if key[0] == "next" else key[:-1] for key in self.reward_keys)
        self._groups = ["/".join(path) for path in grouped if path]
        self._truncated_key = (*self.done_key[:-1], "truncated")
        self.keep = keep
        self._envs: list[_EnvEpisodes] = []

    @property
    def complete(self) -> bool:
        """True if all episodes have been read."""
        if not self.per_env:
            return sum(len(env.returns) for env in self._envs) >= self.episodes
        return bool(self._envs) and all(len(x.returns) >= x.wanted for x in self._envs)

    @property
    def round_complete(self) -> bool:
        """True if each environment has finished its episode of the round."""
        return bool(self._envs) and not any(map(self._reads, self._envs))

    def begin_round(self) -> None:
        """Begins the next round: all environments begin new episodes."""
        self._round += 1
        for env in self._envs:
            env.rewards, env.frames = [], []

    @property
    def frames(self) -> int:
        """Number of frames of the episodes."""
        return sum(self._in_order([env.lengths for env in self._envs]))

    def _reads(self, env: _EnvEpisodes) -> bool:
        return len(env.returns) < min(env.wanted, self._round)

    def add(self, batch: TensorDictBase) -> None:
        """Adds the episodes of a batch of shape ``(*environments, time)``."""
        steps = batch.shape[-1]
        num_envs = batch.shape[:-1].numel()
        if not self._envs:
            shares = [self.episodes] * num_envs
            if self.per_env:
                each, more = divmod(self.episodes, num_envs)
                shares = [each + (index < more) for index in range(num_envs)]
            self._envs = [_EnvEpisodes(share) for share in shares]
        rewards = self._rewards(batch).reshape(num_envs, steps, -1).cpu()
        done = self._get(batch, self.done_key).reshape(num_envs, steps, -1).any(-1).cpu()
        cut = batch.get(self._truncated_key, None)
        truncated = torch.zeros_like(done)
        if cut is not None:
            truncated = cut.reshape(num_envs, steps, -1).any(-1).cpu()
        mask = batch.get(MASK, None)
        real = None if mask is None else mask.reshape(num_envs, steps).cpu()
        for index, env in enumerate(self._envs):
            if self._reads(env):
                rows = torch.arange(steps) if real is None else real[index].nonzero().flatten()
                frames = batch.reshape(num_envs, steps)[index] if self.keep else None
                self._add_to(env, rewards[index], done[index], truncated[index], rows, frames)
        self._rows += steps

    def _add_to(
        self,
        env: _EnvEpisodes,
        rewards: Tensor,
        done: Tensor,
        truncated: Tensor,
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
            env.rewards.append(rewards[picked])
            if frames is not None:
                env.frames.append(frames[picked])
            last = picked[-1]
            if bool(done[last]):
                self._end(env)
                env.ends.append(self._rows + int(last))
                env.truncated.append(bool(truncated[last]))
                if not self._reads(env):
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
        truncated = self._in_order([env.truncated for env in self._envs])
        return EvaluatedEpisodes(
            own,
            lengths,
            seed,
            dict(zip(self._groups, groups, strict=True)),
            np.array(truncated, np.bool_),
            np.array([index for index, _ in self._order()], np.int64),
        )

    def trajectories(self, layout: str) -> TensorDictBase:
        """Returns the trajectories, joined in a layout of :func:`~trawl.data.trajectories.join`."""
        found = self._in_order([env.trajectories for env in self._envs])
        # join() may replace the batches' mask, because add() left out rows that are not steps.
        return join(found, layout)

    def _order(self) -> list[tuple[int, int]]:
        """Returns the environment of each episode, and the episode's number there.

        The episodes alternate between environments, or are in the order of their ends.
        """
        if self.per_env:
            num_envs = len(self._envs)
            return [(number % num_envs, number // num_envs) for number in range(self.episodes)]
        found = [(end, i, n) for i, env in enumerate(self._envs) for n, end in enumerate(env.ends)]
        return [(index, number) for _, index, number in sorted(found)[: self.episodes]]

    def _in_order(self, by_env: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns entries in the order of their episodes."""
        return [by_env[index][number] for index, number in self._order()]
