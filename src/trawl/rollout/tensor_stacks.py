"""Memory for the frames of stacked observations of tensors, and their positions in batches.

A batch has each frame once, in a pool. The stepper writes the frame after each step to the pool,
and the frame with which the next step begins to memory that is not part of the batch, where the
policy reads its stacks (:mod:`trawl.rollout.tensor_windows`). At the end of the batch, positions
are computed from the rows in which episodes begin, on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from trawl.keys import Key, next_of
from trawl.rollout.stack_layout import StackedLeaf, StackLayout
from trawl.rollout.tensor_block import Follow, TensorBlock
from trawl.rollout.tensor_windows import GatheredFrames, StackFrames, WindowedFrames


class TensorStacks:
    """Frames of the stacked observations of an environment whose data are tensors.

    Args:
        layout: layout of the observations.
        newest: the frames with which the next batch begins, ``(num_envs, *leaf)``, by key.
        steps: number of steps in a batch.
        at_once: True if the device answers at once, so that code may look at flags.

    Attributes:
        earlier: the frames before ``newest``, ``(size - 1, num_envs, *leaf)``, by key.
    """

    def __init__(
        self, layout: StackLayout, newest: Mapping[Key, Tensor], steps: int, at_once: bool
    ) -> None:
        self._repeats, self._newest = layout.repeats, newest
        self._recent: dict[Key, StackFrames] = {}
        self._positions: dict[Key, _Positions] = {}
        kind = WindowedFrames if at_once else GatheredFrames
        for key, leaf in layout.leaves.items():
            row = newest[key]
            self._recent[key] = kind(leaf, layout.repeats, row, steps)
            self._positions[key] = _Positions(leaf, layout.repeats, len(row), steps, row.device)
        self.earlier = {key: recent.earlier for key, recent in self._recent.items()}
        self._begun = torch.zeros((steps, len(row)), dtype=torch.bool, device=row.device)

    def restart(self, mask: Tensor | None = None) -> None:
        """Begins stacks in all environments, or where ``mask`` is True, with the newest frames."""
        for key, earlier in self.earlier.items():
            envs = slice(None) if mask is None else mask
            earlier[:, envs] = self._newest[key][envs] if self._repeats else 0

    def first_stacks(self, key: Key) -> Tensor:
        """Returns the stacks with which a batch begins, ``(num_envs, *agents, size, *frame)``."""
        axis = 1 + len(self._positions[key].leaf.agents)
        return torch.stack([*self.earlier[key], self._newest[key]], axis)

    def begin(self, leased: TensorBlock) -> StackedBlock:
        """Begins a batch in leased memory, and returns the block that the loop fills."""
        tensors = dict(leased.tensors)
        for key, recent in self._recent.items():
            recent.begin()
            positions = self._positions[key]
            frames = positions.frames_in(leased.pools[key])
            leased.pools[key][positions.zero] = 0
            size = positions.leaf.size
            frames[: size - 1] = recent.earlier
            frames[size - 1] = self._newest[key]
            tensors[key], tensors[next_of(key)] = recent.rows, frames[size:]
        return StackedBlock(tensors, leased, self._recent, self._begun)

    def finish(self, block: StackedBlock, filled: int) -> tuple[TensorBlock, bool]:
        """Completes a batch, of which ``filled`` steps were taken.

        Returns:
            The batch, and True if its leased memory holds all frames; False if it has no room for
            the first frames of all episodes.
        """
        begun = self._begun
        # Row ``t`` marks the environments in which an episode begins after step ``t``.
        begun[max(filled - 1, 0) :] = False
        begun = torch.cat([torch.zeros_like(begun[:1]), begun[:-1]])
        episodes = begun.nonzero()
        tensors, pools = dict(block.leased.tensors), dict(block.leased.pools)
        fits = True
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
                    pools[key], fits = torch.cat([pools[key][:start], first]), False
            recent.end(filled)
        return TensorBlock(tensors, pools), fits


class StackedBlock(TensorBlock):
    """Memory of a batch with stacked observations, while it is being filled.

    Args:
        tensors: the entries as the stepper writes them, ``(steps, num_envs, *leaf)``, by key.
        leased: the memory that will be delivered.
        recent: the frames that the policy reads, by key.
        begun: memory for the rows after which episodes begin, ``(steps, num_envs)``.
    """

    def __init__(
        self,
        tensors: Mapping[Key, Tensor],
        leased: TensorBlock,
        recent: Mapping[Key, StackFrames],
        begun: Tensor,
    ) -> None:
        super().__init__(tensors)
        self.leased, self._recent, self._begun = leased, recent, begun

    @override
    def inputs(self, key: Key, start: int, stop: int, copied: bool) -> Sequence[Tensor]:
        if key in self._recent:
            return self._recent[key].stacks(start, stop, copied)
        return super().inputs(key, start, stop, copied)

    @override
    def followers(self, start: int, stop: int) -> list[Follow]:
        begun = self._begun[start:stop].unbind(0)

        def note(t: int, starts: Tensor) -> None:
            begun[t].copy_(starts)

        return [note, *(recent.follower(start, stop) for recent in self._recent.values())]


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
