"""What tests of whole trajectories need: the check that they are whole, and come once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase

from trawl.testing import NumberedEnv

TRAJ_IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


class Episodes:
    """Checks whole trajectories of :class:`~trawl.testing.NumberedEnv`.

    Args:
        length: the steps of an episode, by the numbers of its environment and of itself.

    Attributes:
        found: environment and episode of each trajectory, in the order in which they came.
        frames: frames in them.
    """

    def __init__(self, length: Callable[[int, int], int]) -> None:
        self._length = length
        self._ids: set[int] = set()
        self.found: list[tuple[int, int]] = []
        self.frames = 0

    def add(self, batch: TensorDictBase) -> int:
        """Checks a batch in either format; returns the number of trajectories in it."""
        rows = rows_of(batch)
        for row in rows:
            self._check(row)
        return len(rows)

    def _check(self, row: TensorDictBase) -> None:
        numbers = NumberedEnv.numbers(row)
        env, episode = numbers[0, :2].tolist()
        count = self._length(env, episode)
        assert (numbers[:, 0] == env).all(), "frames of several environments"
        assert (numbers[:, 1] == episode).all(), "frames of several episodes"
        assert numbers[:, 2].tolist() == list(range(count)), "not all of the episode's steps"
        assert NumberedEnv.numbers(row["next"])[:, 2].tolist() == list(range(1, count + 1))
        assert row["next", "done"].flatten().tolist() == [False] * (count - 1) + [True]
        (trajectory,) = set(row[TRAJ_IDS].tolist())
        assert trajectory not in self._ids, "a trajectory's id came before"
        assert (env, episode) not in self.found, "a trajectory came before"
        self._ids.add(trajectory)
        self.found.append((env, episode))
        self.frames += count

    @property
    def by_env(self) -> dict[int, list[int]]:
        """The episodes of each environment, in the order in which they came."""
        episodes: dict[int, list[int]] = defaultdict(list)
        for env, episode in self.found:
            episodes[env].append(episode)
        return dict(episodes)


def rows_of(batch: TensorDictBase) -> list[TensorDictBase]:
    """The trajectories of a batch, without padding."""
    if batch.ndim == 1:
        ids = batch[TRAJ_IDS]
        sizes = torch.unique_consecutive(ids, return_counts=True)[1].tolist()
        return list(batch.split(sizes))
    lengths = batch[MASK].sum(-1).tolist()
    assert max(lengths) == batch.shape[1], "padded for longer than the longest"
    for row, length in zip(batch, lengths, strict=True):
        assert row[MASK].tolist() == [True] * length + [False] * (batch.shape[1] - length)
        padding = row[length:]
        assert not any(value.any() for value in padding.values(True, True))
    return [row[:length] for row, length in zip(batch, lengths, strict=True)]


def cycling(lengths: Sequence[int]) -> Callable[[int, int], int]:
    """The steps of an episode, if all environments have these lengths in turn."""
    return lambda env, episode: lengths[episode % len(lengths)]


class Writes:
    """A replay buffer that keeps what it is extended by, each for itself."""

    def __init__(self) -> None:
        self.written: list[TensorDictBase] = []

    def extend(self, batch: TensorDictBase) -> None:
        assert batch.ndim == 1
        self.written.append(batch.clone())
