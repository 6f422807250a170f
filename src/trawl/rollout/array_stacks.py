"""Frames of stacked observations: memory, windows for the policy, and positions in batches.

A batch has each frame once, in a pool. The steppers write the frame after each step to the pool,
and the frame with which the next step begins to ``recent``, memory that is not part of the batch.
The policy reads its stacks there, as windows. If an episode begins, the frames before its first
frame are overwritten with padding, so that windows need not be copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from trawl.envs.agent_groups import groups_of
from trawl.envs.base import TensorDictEnv
from trawl.envs.frame_stack import FrameStack
from trawl.keys import Key, next_of
from trawl.memory import Array
from trawl.rollout.block import Block, as_array
from trawl.rollout.episodes import StepArrays
from trawl.rollout.layout import Leaf, pool_key
from trawl.rollout.stack_stage import StackedLeaf, StackStage
from trawl.rollout.windows import Windows


class ArrayStacks(StackStage[Array, StepArrays]):
    """Frames of the stacked observations of a batch of environments.

    Args:
        option: the option of the collector.
        env: the environment.
        observed: layout of all its observations, by key.
        steps: number of steps in a batch.

    Attributes:
        passed_on: the frames after the last step of a batch, ``(num_envs, *agents, *frame)``, by
            key.
    """

    def __init__(
        self, option: FrameStack, env: TensorDictEnv, observed: Mapping[Key, Leaf], steps: int
    ) -> None:
        super().__init__(option, observed, groups_of(env))
        size, batch, num_envs = self._size, tuple(env.batch_size), env.batch_size.numel()
        self.starts = [self]
        self._recent = {
            key: as_array(
                torch.zeros(
                    (num_envs, size + steps, *leaf.agents, *leaf.frame.shape),
                    dtype=leaf.frame.dtype,
                )
            )
            for key, leaf in self.leaves.items()
        }
        self.passed_on = {key: rows[:, -1] for key, rows in self._recent.items()}
        self._windows = {
            key: Windows(rows, size, self.leaves[key].agents, batch, self.settle)
            for key, rows in self._recent.items()
        }
        # In a batch in which no episode begins, and in which a step of an environment has one
        # frame: positions of the frames of each step, and position of the frame of zeros.
        rows, step = np.arange(num_envs) * (size + steps), np.arange(steps)[:, None, None]
        self._positions: NDArray[np.int64] = step + rows[:, None] + np.arange(size)
        self._zero = num_envs * (size + steps)
        self._pool: dict[Key, Array] = {}
        self._starts: Mapping[Key, int] = {}
        # Environments and first rows of episodes whose first frames have not been stored yet.
        self._begun: list[tuple[int, int]] = []
        # The same for episodes whose first frames have been stored.
        self._stored: list[tuple[int, int]] = []
        # First frames for which the pool has no room.
        self._more: dict[Key, list[Array]] = {}

    # --- between batches

    @override
    def restart(self, mask: NDArray[np.bool_] | None) -> None:
        envs: Any = slice(None) if mask is None else mask
        for key, recent in self._recent.items():
            first = self.passed_on[key][envs]
            recent[envs, : self._size - 1] = first[:, None] if self._repeats else 0

    @override
    def first_read(self, key: Key) -> Array | None:
        if key not in self.leaves:
            return None
        frames = np.concatenate([self.earlier[key], self.passed_on[key][:, None]], 1)
        return np.moveaxis(frames, 1, 1 + len(self.leaves[key].agents))

    @property
    @override
    def earlier(self) -> dict[Key, Array]:
        return {key: recent[:, : self._size - 1] for key, recent in self._recent.items()}

    # --- within a batch

    @override
    def begin(self, block: Block, view: StepArrays) -> StepArrays:
        self._begun.clear()
        self._stored.clear()
        self._more = {key: [] for key in self._recent}
        block.windows, block.grown = self._windows, {}
        lease = block.lease
        self._starts = lease.pool_starts
        arrays = dict(view.arrays)
        for key, recent in self._recent.items():
            size, zero = self._size, self._zero * self.leaves[key].per_env
            recent[:, size - 1] = self.passed_on[key]
            start = self._starts.get(key, 0)
            rows = block.layout.pool_rows[key]
            frames = as_array(lease.tensors[pool_key(key)])[start : start + rows]
            self._pool[key] = frames
            frames[zero] = 0
            own = frames[:zero].reshape(recent.shape)
            own[:, :size] = recent[:, :size]
            arrays[key] = recent[:, size - 1 : -1].swapaxes(0, 1)
            arrays[next_of(key)] = own[:, size:].swapaxes(0, 1)
        return StepArrays(arrays, view.next_obs, view.first, view.bfloat16)

    def write(self, index: int, row: int) -> None:
        """Notes that an episode of an environment begins in ``row``.

        Its first frame is not there yet.
        """
        self._begun.append((index, row))

    def settle(self) -> None:
        """Stores the first frames of episodes that have begun, and completes their stacks."""
        if not self._begun:
            return
        for index, row in self._begun:
            last, number = row + self._size - 1, len(self._stored)
            self._stored.append((index, row))
            for key, recent in self._recent.items():
                first, pool, leaf = recent[index, last], self._pool[key], self.leaves[key]
                position = self._first_position(leaf, number)
                if position < len(pool):
                    pool[position : position + leaf.per_env] = first
                else:
                    self._more[key].append(first.copy())
                recent[index, row:last] = first if self._repeats else 0
        self._begun.clear()

    def _first_position(self, leaf: StackedLeaf, number: int) -> int:
        """Returns the position of an episode's first frame; in a group, of the first agent's."""
        return (self._zero + number) * leaf.per_env + 1

    @override
    def finish(self, block: Block, filled: int) -> None:
        self.settle()
        size = self._size
        for key, recent in self._recent.items():
            recent[:, :size] = recent[:, filled : filled + size].copy()
            start = 0 if self._more[key] else self._starts.get(key, 0)
            roots, after = block.flat_rows[key], block.flat_rows[next_of(key)]
            leaf = self.leaves[key]
            zero, agents = start + self._zero * leaf.per_env, np.arange(leaf.per_env)[:, None]
            if not leaf.agents:
                np.add(self._positions, start, out=roots)
            else:
                np.add(self._positions[:, :, None] * leaf.per_env, start + agents, out=roots)
            np.add(roots, leaf.per_env, out=after)
            for number, (index, row) in enumerate(self._stored):
                first = start + self._first_position(leaf, number) + agents
                padding = first if self._repeats else zero
                _begin_stacks(roots[row:, index], size - 1, padding, first)
                _begin_stacks(after[row:, index], size - 2, padding, first)
            roots[filled:] = after[filled:] = zero
            if self._more[key]:
                pool, more = self._pool[key], self._more[key]
                # A frame may have no elements, so numpy can't find the size of a dimension.
                added = np.stack(more).reshape(len(more) * leaf.per_env, *pool.shape[1:])
                block.grown[key] = torch.from_numpy(np.concatenate([pool, added]))


def _begin_stacks(rows: Array, earlier: int, padding: Any, first: NDArray[np.int64]) -> None:
    """Changes the positions in the first stacks of an episode.

    Args:
        rows: positions of the frames of each step, from the episode's first step on.
        earlier: number of frames before the episode's first frame in the first stack.
        padding: position of the frame that completes stacks, or a column of these, one per agent.
        first: positions of the episode's first frames, a column with one per agent.
    """
    for step in range(min(earlier + 1, len(rows))):
        before = earlier - step
        rows[step].reshape(len(first), -1)[:, :before] = padding
        rows[step].reshape(len(first), -1)[:, before : before + 1] = first
