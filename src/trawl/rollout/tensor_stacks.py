"""Memory for the frames of stacked observations of tensors, and their positions in batches.

A batch has each frame once, in a pool. The stepper writes the frame after each step to the pool,
and the frame with which the next step begins to memory that is not part of the batch, where the
policy reads its stacks (:mod:`trawl.rollout.tensor_windows`). At the end of the batch, positions
are computed from the rows in which episodes begin, on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from trawl.envs.frame_stack import FrameStack
from trawl.envs.tensor_env import TensorEnv
from trawl.keys import Key, next_of
from trawl.rollout.layout import Leaf
from trawl.rollout.stack_stage import StackedLeaf, StackStage
from trawl.rollout.tensor_block import TensorBlock
from trawl.rollout.tensor_windows import GatheredFrames, StackFrames, WindowedFrames


class TensorStacks(StackStage[Tensor, TensorBlock]):
    """Frames of the stacked observations of an environment whose data are tensors.

    Args:
        option: the option of the collector.
        env: the environment.
        observed: layout of all its observations, by key.
        newest: the frames with which the next batch begins, ``(num_envs, *leaf)``, by key.
        steps: number of steps in a batch.
    """

    def __init__(
        self,
        option: FrameStack,
        env: TensorEnv,
        observed: Mapping[Key, Leaf],
        newest: Mapping[Key, Tensor],
        steps: int,
    ) -> None:
        super().__init__(option, env, observed)
        self._newest = newest
        self._recent: dict[Key, StackFrames] = {}
        self._positions: dict[Key, _Positions] = {}
        # Code that looks at flags would wait for a device that doesn't answer at once.
        kind = WindowedFrames if env.answers_at_once else GatheredFrames
        for key, leaf in self.leaves.items():
            row = newest[key]
            self._recent[key] = kind(leaf, self._repeats, row, steps)
            self._positions[key] = _Positions(leaf, self._repeats, len(row), steps, row.device)
        self._begun = torch.zeros((steps, len(row)), dtype=torch.bool, device=row.device)
        # Entries of the batch as they will be delivered.
        self._delivered: dict[Key, Tensor] = {}

    @property
    @override
    def earlier(self) -> dict[Key, Tensor]:
        return {key: recent.earlier for key, recent in self._recent.items()}

    @override
    def restart(self, mask: Tensor | None) -> None:
        for key, earlier in self.earlier.items():
            first = self._newest[key] if self._repeats else torch.zeros_like(self._newest[key])
            if mask is not None:
                # Without looking at the mask, which would wait for a device.
                first = torch.where(mask.view(-1, *[1] * (first.ndim - 1)), first, earlier)
            earlier.copy_(first)

    @override
    def first_read(self, key: Key) -> Tensor | None:
        if key not in self.leaves:
            return None
        return torch.stack(
            [*self.earlier[key], self._newest[key]], 1 + len(self.leaves[key].agents)
        )

    @override
    def begin(self, block: TensorBlock, view: TensorBlock) -> TensorBlock:
        self._delivered, block.tensors = block.tensors, dict(block.tensors)
        block.windows, block.begun = self._recent, self._begun
        for key, recent in self._recent.items():
            recent.begin()
            positions = self._positions[key]
            frames = positions.frames_in(block.pools[key])
            block.pools[key][positions.zero] = 0
            size = positions.leaf.size
            frames[: size - 1] = recent.earlier
            frames[size - 1] = self._newest[key]
            block.tensors[key], block.tensors[next_of(key)] = recent.rows, frames[size:]
        return view

    @override
    def finish(self, block: TensorBlock, filled: int) -> None:
        begun = self._begun
        # Row ``t`` marks the environments in which an episode begins after step ``t``.
        begun[max(filled - 1, 0) :] = False
        begun = torch.cat([torch.zeros_like(begun[:1]), begun[:-1]])
        episodes = begun.nonzero()
        tensors, pools = self._delivered, block.pools
        for key, recent in self._recent.items():
            positions, after = self._positions[key], next_of(key)
            positions.write(tensors[key], tensors[after], begun if len(episodes) else None)
            tensors[key][filled:] = tensors[after][filled:] = positions.zero
            if len(episodes):
                first = recent.first_frames(episodes).flatten(0, len(positions.leaf.agents))
                start, stop = positions.zero + 1, positions.zero + 1 + len(first)
                if stop <= len(pools[key]):
                    pools[key][start:stop] = first
                else:
                    # The leased memory has no room for the first frames of all episodes.
                    pools[key], block.grown = torch.cat([pools[key][:start], first]), True
            recent.end(filled)
        block.tensors, self._delivered = tensors, {}


class _Positions:
    """Positions of the frames of one observation in its pool.

    The pool has the frames with which a batch begins and one for each step, time first. After
    these, it has a frame of zeros, and the first frames of episodes.

    Args:
        leaf: the observation.
        repeats: True if an episode's first frame completes its first stacks.
        num_envs: number of environments.
        steps: number of steps in a batch.
        device: device of the positions.

    Attributes:
        leaf: the observation.
        zero: position of the frame of zeros.
    """

    def __init__(
        self, leaf: StackedLeaf, repeats: bool, num_envs: int, steps: int, device: torch.device
    ) -> None:
        self.leaf, self._repeats, self._num_envs = leaf, repeats, num_envs
        size, count = leaf.size, leaf.per_env
        self.zero = (size + steps) * num_envs * count
        row = torch.arange(steps + 1, device=device)[:, None, None, None]
        frame, agent = torch.arange(size, device=device), torch.arange(count, device=device)
        env = torch.arange(num_envs, device=device)[:, None, None]
        self._agent = agent[:, None]
        # In a batch in which no episode begins: (steps + 1, num_envs, per_env, size).
        self._whole = ((row + frame) * num_envs + env) * count + self._agent
        self._steps = row[:-1, :, 0, 0]
        # Number of steps before the newest frame of the stack.
        self._back = (size - 1) - frame

    def frames_in(self, pool: Tensor) -> Tensor:
        """Returns the frames of steps in a pool, ``(size + steps, num_envs, *agents, *frame)``."""
        leaf = self.leaf
        # A frame may have no elements, so torch can't find the size of a dimension.
        lead = (leaf.size + len(self._steps), self._num_envs, *leaf.agents)
        return pool[: self.zero].view(*lead, *leaf.frame.shape)

    def write(self, roots: Tensor, after: Tensor, begun: Tensor | None) -> None:
        """Writes the positions of stacks before and after each step.

        Args:
            roots: target of the positions before each step, ``(steps, num_envs, *agents, size)``.
            after: target of the positions after each step.
            begun: True where the row is the first of an episode, ``(steps, num_envs)``; None if no
                row is.
        """
        shape = (*begun.shape, -1, self.leaf.size) if begun is not None else self._whole[1:].shape
        roots, after = roots.view(shape), after.view(shape)
        if begun is None:
            roots.copy_(self._whole[:-1])
            after.copy_(self._whole[1:])
            return
        # Steps since the first one of the episode. An episode that began in an earlier batch needs
        # no padding, because the frames before this batch include its padding.
        start = self._steps.where(begun, -self.leaf.size).cummax(0).values
        age = (self._steps - start)[:, :, None, None]
        number = begun.view(-1).cumsum(0).view_as(begun) - 1
        first = (self.zero + 1 + number * self.leaf.per_env).where(begun, 0).cummax(0).values
        first = first[:, :, None, None] + self._agent
        whole = self._whole
        for target, plain, steps in ((roots, whole[:-1], age), (after, whole[1:], age + 1)):
            padding = first
            if not self._repeats:
                padding = first.where(steps == self._back, self.zero)
            torch.where(steps <= self._back, padding, plain, out=target)
