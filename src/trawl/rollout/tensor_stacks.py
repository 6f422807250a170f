"""Memory for the frames of stacked observations of tensors, and their positions in batches.

A batch has each frame once, in a pool. The stepper writes the frame after each step to the pool,
and the frame with which the next step begins to memory that is not part of the batch, where the
policy reads its stacks (:class:`StackFrames`). At the end of the batch, positions are computed from
the rows in which episodes begin, on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from trawl.envs.frame_stack import FrameStack
from trawl.keys import Key, next_of
from trawl.rollout.block import Block, as_array
from trawl.rollout.episodes import Follow
from trawl.rollout.layout import Leaf, pool_key
from trawl.rollout.policy_inputs import InputCopies, InputRows, LazyRows
from trawl.rollout.stack_stage import StackedLeaf, StackStage
from trawl.rollout.step_tensors import StepTensors
from trawl.rollout.tensor_stepper import TensorSource


class TensorStacks(StackStage[Tensor, StepTensors]):
    """Frames of the stacked observations of an environment whose data are tensors.

    Args:
        option: the option of the collector.
        env: the environment.
        groups: keys of the groups of agents.
        observed: layout of all observations, by key.
        newest: the frames with which the next batch begins, ``(num_envs, *leaf)``, by key.
        steps: number of steps in a batch.
    """

    def __init__(
        self,
        option: FrameStack,
        env: TensorSource,
        groups: Collection[str],
        observed: Mapping[Key, Leaf],
        newest: Mapping[Key, Tensor],
        steps: int,
    ) -> None:
        super().__init__(option, observed, groups)
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
    def begin(self, block: Block, view: StepTensors) -> StepTensors:
        arrays, pools = dict(view.arrays), block.lease.tensors
        block.windows = self._recent
        for key, recent in self._recent.items():
            recent.begin()
            positions, pool = self._positions[key], pools[pool_key(key)]
            frames = positions.frames_in(pool)
            pool[positions.zero] = 0
            size = positions.leaf.size
            frames[: size - 1] = recent.earlier
            frames[size - 1] = self._newest[key]
            arrays[key], arrays[next_of(key)] = recent.rows, frames[size:]
        return StepTensors(arrays, view.next_obs)

    @override
    def followers(self, start: int, stop: int) -> list[Follow]:
        begun = self._begun[start:stop].unbind(0)

        def note(t: int, starts: Tensor) -> None:
            begun[t].copy_(starts)

        return [note, *(recent.follower(start, stop) for recent in self._recent.values())]

    @override
    def finish(self, block: Block, filled: int) -> None:
        begun = self._begun
        # Row ``t`` marks the environments in which an episode begins after step ``t``.
        begun[max(filled - 1, 0) :] = False
        begun = torch.cat([torch.zeros_like(begun[:1]), begun[:-1]])
        episodes = begun.nonzero()
        tensors, pools = block.tensors, block.lease.tensors
        for key, recent in self._recent.items():
            positions, after = self._positions[key], next_of(key)
            positions.write(tensors[key], tensors[after], begun if len(episodes) else None)
            tensors[key][filled:] = tensors[after][filled:] = positions.zero
            if len(episodes):
                first = recent.first_frames(episodes).flatten(0, len(positions.leaf.agents))
                pool = pools[pool_key(key)]
                start, stop = positions.zero + 1, positions.zero + 1 + len(first)
                if stop <= len(pool):
                    pool[start:stop] = first
                else:
                    # The leased memory has no room for the first frames of all episodes.
                    block.grown[key] = torch.cat([pool[:start], first])
            recent.end(filled)


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
    def stacks(self, start: int, stop: int, envs: slice, copied: bool) -> InputRows:
        """Returns the stacks of the steps of a chunk, ``(num_envs, *agents, size, *frame)``.

        See :class:`~trawl.rollout.block.StackRows`.
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
    def stacks(self, start: int, stop: int, envs: slice, copied: bool) -> InputRows:
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
    def stacks(self, start: int, stop: int, envs: slice, copied: bool) -> InputRows:
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
