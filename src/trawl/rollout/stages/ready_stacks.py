"""Stacks of frames in the order of their arrival, where a row of a batch is one environment's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from trawl.envs.processes.ready import Rows
from trawl.keys import Key, next_of
from trawl.memory import Array
from trawl.rollout.block import Block
from trawl.rollout.episodes import StepArrays
from trawl.rollout.layout import as_array, pool_key, zeros
from trawl.rollout.stages.stacks import StackedLeaf, StackStage
from trawl.rollout.stages.stage import StageSetup

# Room in a pool for stacks with which episodes begin: one for each of so many frames, and a few.
_FRAMES_PER_EPISODE, _FIRST_STACKS = 16, 4


class ReadyStacks(StackStage[Array, StepArrays]):
    """Stacks frames in the order of their arrival.

    The policy reads an environment's stack in memory that is not part of the batch. The pool of a
    batch has the frame after each step, in order. If the frames before it are not there yet, which
    are those of an earlier batch or of an episode's first stack, the whole stack is added.

    Args:
        setup: what the stage is made from.

    Attributes:
        passed_on: the stacks that the policy reads next, ``(num_envs, *agents, size, *frame)``, by
            key.
    """

    def __init__(self, setup: StageSetup[Array]) -> None:
        super().__init__(setup)
        size, count = self._size, setup.num_envs
        stacks = count + setup.options.steps // _FRAMES_PER_EPISODE + _FIRST_STACKS
        self.pools = {
            key: replace(pool, more=pool.per_env * size * stacks)
            for key, pool in self.pools.items()
        }
        self.passed_on = {
            key: zeros((count, *leaf.stack.shape), leaf.frame.dtype)
            for key, leaf in self.leaves.items()
        }
        # The same stacks, as ``(num_envs, size, *agents, *frame)``.
        self._stacks = {
            key: np.moveaxis(stack, 1 + len(self.leaves[key].agents), 1)
            for key, stack in self.passed_on.items()
        }
        # Numbers of the frames of each stack in the pool, if they are there. All agents of a group
        # have the frame of one number.
        self._numbers = np.zeros((count, size), np.int64)
        self._stored = np.zeros(count, np.bool_)
        # Room in the pools, number of frames in them, and frames that have no room there.
        self._room = self._used = 0
        self._more: dict[Key, list[Array]] = {}
        self._pool: dict[Key, Array] = {}
        # The entries of the batch that have positions.
        self._roots: list[tuple[StackedLeaf, Array]] = []
        self._after: list[tuple[StackedLeaf, Array]] = []

    @override
    def first_rows(self, rows: Mapping[Key, Array]) -> Mapping[Key, Array]:
        return {**rows, **{key: stack[:, -1] for key, stack in self._stacks.items()}}

    @override
    def restart(self, mask: Array | None) -> None:
        envs: Any = slice(None) if mask is None else mask
        self._stored[envs] = False
        for stack in self._stacks.values():
            stack[envs, :-1] = stack[envs, -1:] if self._repeats else 0

    @property
    @override
    def earlier(self) -> dict[Key, Array]:
        return {}  # whole stacks are passed on

    # --- a batch

    @override
    def begin(self, block: Block, view: StepArrays) -> StepArrays:
        layout, lease, arrays = block.layout, block.lease, dict(view.arrays)
        self._stored[:], self._used, block.grown = False, layout.steps, {}
        self._more = {key: [] for key in self.leaves}
        self._room = min(layout.pool_rows[key] // leaf.per_env for key, leaf in self.leaves.items())
        for key, leaf in self.leaves.items():
            start, frames = lease.pool_starts.get(key, 0), as_array(lease.tensors[pool_key(key)])
            pool = frames[start : start + self._room * leaf.per_env]
            self._pool[key] = pool = pool.reshape(self._room, *leaf.agents, *leaf.frame.shape)
            arrays[next_of(key)] = pool[: layout.steps, None]
        self._roots, self._after = (
            [(leaf, block.flat_rows[of(key)][:, 0]) for key, leaf in self.leaves.items()]
            for of in (tuple, next_of)
        )
        return StepArrays(arrays, view.next_obs)

    @override
    def record(self, envs: Rows, start: int) -> None:
        new = envs[~self._stored[envs]]
        if len(new):
            self._store(new)
        self._write(self._roots, envs, start)
        for stack in self._stacks.values():
            stack[envs, :-1] = stack[envs, 1:]

    def _write(self, entries: Sequence[tuple[StackedLeaf, Array]], envs: Rows, start: int) -> None:
        """Writes the positions of the stacks of some environments, from row ``start`` on."""
        numbers = self._numbers[envs]
        for leaf, rows in entries:
            rows[start : start + len(envs)] = (
                numbers[:, None] * leaf.per_env + np.arange(leaf.per_env)[:, None]
                if leaf.agents
                else numbers
            )

    def _store(self, envs: Rows) -> None:
        """Adds the stacks of some environments to the pools."""
        count = len(envs) * self._size
        fits = self._used + count <= self._room
        if not fits:
            self._used = max(self._used, self._room)
        first, self._used = self._used, self._used + count
        for key, stack in self._stacks.items():
            frames = stack[envs].reshape(count, *stack.shape[2:])
            if fits:
                self._pool[key][first : self._used] = frames
            else:
                self._more[key].append(frames)
        self._numbers[envs] = np.arange(first, self._used).reshape(-1, self._size)
        self._stored[envs] = True

    @override
    def pass_on(self, envs: Rows, start: int) -> None:
        numbers = self._numbers
        numbers[envs, :-1] = numbers[envs, 1:]
        numbers[envs, -1] = np.arange(start, start + len(envs))
        self._write(self._after, envs, start)

    @override
    def begin_episodes(self, envs: Rows) -> None:
        self.restart(envs)

    @override
    def finish(self, block: Block, filled: int) -> None:
        for key, leaf in self.leaves.items():
            more = self._more[key]
            start = 0 if more else block.lease.pool_starts.get(key, 0)
            for name in (key, next_of(key)):
                rows = block.flat_rows[name]
                rows[:filled] += start
                rows[filled:] = start
            if more:
                grown = np.concatenate([self._pool[key], *more])
                grown = grown.reshape(len(grown) * leaf.per_env, *leaf.frame.shape)
                block.grown[key] = torch.from_numpy(grown)
        self._roots, self._after, self._pool = [], [], {}
