"""Stacks of frames that a policy reads in an environment of tensors.

Each class holds the frames of one observation that the policy reads, in memory that is not part of
the batch. Time is the first dimension, and the frames before the batch come first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from trawl.rollout.block import as_array
from trawl.rollout.policy_inputs import InputCopies
from trawl.rollout.stack_stage import StackedLeaf
from trawl.rollout.tensor_block import Follow, LazyRows


class StackFrames(ABC):
    """Frames of one observation with which the steps of a batch begin.

    Args:
        leaf: the observation.
        repeats: True if an episode's first frame completes its first stacks; False if frames of
            zeros do.
        newest: the frames with which the next batch begins, ``(num_envs, *agents, *frame)``.
        steps: number of steps in a batch.

    Attributes:
        earlier: the frames before the first one of the batch, ``(size - 1, *newest.shape)``.
        rows: the frame of each step, ``(steps, *newest.shape)``.
    """

    # Number of rows after those of the steps.
    _more_rows: ClassVar[int] = 0

    def __init__(self, leaf: StackedLeaf, repeats: bool, newest: Tensor, steps: int) -> None:
        self._leaf, self._repeats, self._newest = leaf, repeats, newest
        self._steps, self._before = steps, leaf.size - 1
        count = self._before + steps + self._more_rows
        self._memory = newest.new_zeros((count, *newest.shape))
        self.earlier = self._memory[: self._before]
        self.rows = self._memory[self._before : self._before + steps]

    @abstractmethod
    def begin(self) -> None:
        """Begins a batch, after :meth:`end` or an error in the batch before."""

    def following(self, start: int, stop: int) -> list[Tensor]:
        """Returns the frame after each step of a chunk with which the next step begins."""
        found = [*self.rows[start + 1 : stop + 1].unbind(0)]
        return found if len(found) == stop - start else [*found, self._newest]

    @abstractmethod
    def stacks(self, start: int, stop: int, copied: bool) -> Sequence[Tensor]:
        """Returns the stacks of the steps of a chunk, ``(num_envs, *agents, size, *frame)``.

        Args:
            start: first step of the chunk.
            stop: step after the last one of the chunk.
            copied: True for memory that nothing else refers to.
        """

    @abstractmethod
    def follower(self, start: int, stop: int) -> Follow:
        """Returns a function that begins stacks, to call after each step of a chunk."""

    @abstractmethod
    def first_frames(self, episodes: Tensor) -> Tensor:
        """Returns the first frames of the episodes that begin within the batch.

        Args:
            episodes: first row and environment of each episode, in the order of the rows.
        """

    @abstractmethod
    def end(self, filled: int) -> None:
        """Ends a batch of ``filled`` steps, and sets ``earlier`` for the next one."""


class WindowedFrames(StackFrames):
    """Frames in which a stack is a window of consecutive frames, without a copy.

    If an episode begins, the frames before its first one are overwritten. To find the environments,
    the code looks at the flags, so it would wait for a GPU.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._firsts: list[Tensor] = []
        axis = 2 + len(self._leaf.agents)
        # (steps, num_envs, *agents, size, *frame)
        self._stacks = self._memory.unfold(0, self._leaf.size, 1).movedim(-1, axis)
        self._copies = InputCopies(self._memory.dtype)

    @override
    def begin(self) -> None:
        self._firsts = []

    @override
    def stacks(self, start: int, stop: int, copied: bool) -> Sequence[Tensor]:
        rows = self._stacks[start:stop]
        if not copied:
            return rows.unbind(0)
        self._copies.bind(as_array(rows))
        return LazyRows(self._copies.__getitem__, stop - start)

    @override
    def follower(self, start: int, stop: int) -> Follow:
        memory, before, following = self._memory, self._before, self.following(start, stop)

        def write(t: int, starts: Tensor) -> None:
            found = starts.numpy().nonzero()[0]
            if not len(found):
                return
            envs, row = torch.from_numpy(found), start + t + 1
            first = following[t].index_select(0, envs)
            self._firsts.append(first)
            padded = memory[row : row + before]
            if self._repeats:
                padded.index_copy_(1, envs, first.expand(before, *first.shape))
            else:
                padded.index_fill_(1, envs, 0)

        return write

    @override
    def first_frames(self, episodes: Tensor) -> Tensor:
        # The last episodes may begin after the batch.
        return torch.cat(self._firsts)[: len(episodes)]

    @override
    def end(self, filled: int) -> None:
        found = self._memory[filled : filled + self._before]
        self.earlier.copy_(found if filled >= self._before else found.clone())


class GatheredFrames(StackFrames):
    """Frames that are gathered to stacks when they are read, without waiting for the device."""

    _more_rows = 2  # the newest frames, and frames of zeros

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        leaf, memory = self._leaf, self._memory
        self._lead = (*self._newest.shape[: 1 + len(leaf.agents)], leaf.size)
        self._flat = memory.flatten(0, 1 + len(leaf.agents))
        # Positions of the frames of the first environment, and what to add for the others.
        row = self._row = len(self._flat) // len(memory)
        steps, frames = torch.arange(self._steps + 1), torch.arange(leaf.size)
        windows = (steps[:, None] + frames) * row
        shape = (*[1] * (len(self._lead) - 1), leaf.size)
        self._windows = windows.view(-1, *shape).to(memory.device)
        self._others = torch.arange(row, device=memory.device).view(*self._lead[:-1], 1)
        self._zeros = (len(memory) - 1) * row
        # Position of the first frame of each environment's episode, without ``others``.
        self._start = torch.zeros(len(self._newest), dtype=torch.int64, device=memory.device)
        self._starts = self._start.view(-1, *[1] * (len(self._lead) - 1))

    @override
    def begin(self) -> None:
        self._start.zero_()

    @override
    def stacks(self, start: int, stop: int, copied: bool) -> Sequence[Tensor]:
        windows = self._windows[start:stop].unbind(0)
        return LazyRows(lambda t: self._at(windows[t], self._lead), len(windows))

    def _at(self, windows: Tensor, lead: tuple[int, ...]) -> Tensor:
        if self._repeats:
            positions = torch.maximum(windows, self._starts)
        else:
            positions = windows.masked_fill(windows < self._starts, self._zeros)
        found = self._flat.index_select(0, (positions + self._others).view(-1))
        return found.view(*lead, *self._leaf.frame.shape)

    @override
    def follower(self, start: int, stop: int) -> Follow:
        begun, row, first = self._start, self._row, start + self._leaf.size

        def write(t: int, starts: Tensor) -> None:
            begun.masked_fill_(starts, (first + t) * row)

        return write

    @override
    def first_frames(self, episodes: Tensor) -> Tensor:
        return self.rows[episodes[:, 0], episodes[:, 1]]

    @override
    def end(self, filled: int) -> None:
        # The row may have been cleared, like all rows after the last step.
        self._memory[self._before + filled].copy_(self._newest)
        windows = self._windows[filled][..., :-1]
        found = self._at(windows, (*self._lead[:-1], self._before))
        self.earlier.copy_(found.movedim(len(self._lead) - 1, 0))
