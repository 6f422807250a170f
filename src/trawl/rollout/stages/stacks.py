"""Stages that stack frames: memory for the frames, stacks for the policy, positions in batches.

A batch has each frame once, in a pool. The stepper writes the frame after each step to the pool,
and the frame with which the next step begins to memory that is not part of the batch, where the
policy reads its stacks (:class:`StackFrames`). At the end of the batch, positions are computed from
the rows in which episodes begin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from trawl.envs.frame_stack import FrameStack
from trawl.keys import Key, next_of, show_key
from trawl.memory import Array
from trawl.rollout.batches import BatchOptions
from trawl.rollout.block import Block
from trawl.rollout.episodes import Follow, StepArrays
from trawl.rollout.inputs import InputCopies, InputRows, LazyRows
from trawl.rollout.layout import FramePool, Leaf, as_array, pool_key
from trawl.rollout.policy.leaves import PolicyLeaves
from trawl.rollout.stages.stage import Rows, Stage, StageSetup, View
from trawl.rollout.step_tensors import StepTensors


@dataclass(frozen=True)
class StackedLeaf:
    """Layout of one stacked observation.

    Attributes:
        frame: layout of one frame; in a group of agents, of the frame of one agent.
        size: number of frames in a stack.
        agents: number of agents in a group, as a dimension; ``()`` if there are no groups.
    """

    frame: Leaf
    size: int
    agents: tuple[int, ...] = ()

    @property
    def per_env(self) -> int:
        """Number of frames of an environment in each step."""
        return self.agents[0] if self.agents else 1

    @property
    def positions(self) -> Leaf:
        """Layout of the entry in a batch, which has the positions of frames."""
        return Leaf((*self.agents, self.size), torch.int64)

    @property
    def stack(self) -> Leaf:
        """Layout of the entry as the policy reads it."""
        return Leaf((*self.agents, self.size, *self.frame.shape), self.frame.dtype)

    @property
    def pool(self) -> FramePool:
        """Layout of the memory for the frames of a batch."""
        return FramePool(self.frame, self.size, self.per_env)


class StackStage(Stage[Rows, View]):
    """Stage that stacks observations of an environment.

    A batch has each frame once, in a pool, and the positions of the frames of each stack.

    Args:
        setup: what the stage is made from.

    Attributes:
        leaves: the stacked observations, by key.

    Raises:
        ValueError: if there is no observation to stack.
    """

    def __init__(self, setup: StageSetup[Rows]) -> None:
        option, observed, groups = self._option(setup.options), setup.observed, setup.groups
        self._size = option.size
        # True if an episode's first frame completes its first stacks; False if zeros do.
        self._repeats = option.padding == "reset"
        self.leaves: dict[Key, StackedLeaf] = {}
        for key in self.reads(setup):
            leaf, axes = observed[key], 1 if key[0] in groups and len(key) > 1 else 0
            frame = Leaf(leaf.shape[axes:], leaf.dtype)
            self.leaves[key] = StackedLeaf(frame, option.size, leaf.shape[:axes])
        self.keys = list(self.leaves)
        self.pools = {key: leaf.pool for key, leaf in self.leaves.items()}

    @staticmethod
    def _option(options: BatchOptions) -> FrameStack:
        assert options.frame_stack is not None
        return options.frame_stack

    @override
    @classmethod
    def is_needed(cls, options: BatchOptions) -> bool:
        return options.frame_stack is not None

    @override
    @classmethod
    def reads(cls, setup: StageSetup[Any]) -> list[Key]:
        option = cls._option(setup.options)
        setup.check_fixed("frame_stack", option.keys)
        return option.stacked(setup.observed if option.keys else setup.features, setup.groups)

    @override
    def readable(self, leaves: Mapping[Key, Leaf]) -> Mapping[Key, Leaf]:
        return {**leaves, **{key: leaf.stack for key, leaf in self.leaves.items()}}

    @override
    def in_batch(self, leaves: Mapping[Key, Leaf]) -> Mapping[Key, Leaf]:
        positions = {key: leaf.positions for key, leaf in self.leaves.items()}
        after = {next_of(key): leaf for key, leaf in positions.items()}
        return {**leaves, **positions, **after}

    @override
    def check_policy(self, leaves: PolicyLeaves) -> None:
        for key in self.leaves:
            for name in (key, next_of(key)):
                if name in leaves.written:
                    raise ValueError(
                        f"the policy writes {show_key(name)}, which frame_stack stacks: choose the "
                        "observations with FrameStack(..., keys=[...])"
                    )

    @property
    @abstractmethod
    def earlier(self) -> Mapping[Key, Rows]:
        """The frames before the newest ones with which the next batch begins, by key."""

    @override
    def saved_rows(self) -> dict[str, Rows]:
        return {f"{show_key(key)} earlier": rows for key, rows in self.earlier.items()}


class FrameStacks(StackStage[Any, Any]):
    """Stage that stacks the frames of all environments at once, as arrays or tensors.

    Args:
        setup: what the stage is made from. Its rows are the frames with which the next batch
            begins, ``(num_envs, *leaf)``.
    """

    def __init__(self, setup: StageSetup[Any]) -> None:
        super().__init__(setup)
        steps, batch = setup.options.steps, setup.batch
        self._newest: dict[Key, Tensor] = {}
        self._positions: dict[Key, _Positions] = {}
        # Code that looks at flags would wait for a device that doesn't answer at once.
        self._windows: list[WindowedFrames] = []
        self._gathered: list[GatheredFrames] = []
        self._of_arrays = False
        for key, leaf in self.leaves.items():
            row = setup.next_rows[key]
            if not isinstance(row, Tensor):
                self._of_arrays, row = True, torch.from_numpy(row).view(leaf.frame.dtype)
            self._newest[key] = row
            parts = leaf, self._repeats, row, steps
            self._positions[key] = _Positions(leaf, self._repeats, len(row), steps, row.device)
            if setup.at_once:
                self._windows.append(WindowedFrames(*parts, batch, self.settle, self._of_arrays))
            else:
                self._gathered.append(GatheredFrames(*parts))
        self._recent = dict(zip(self.leaves, self._windows or self._gathered, strict=True))
        self._begun = torch.zeros((steps, setup.num_envs), dtype=torch.bool, device=setup.home)
        if self._of_arrays:
            self.starts = [self]
        # First rows of episodes and their environments: those whose first frames have not been
        # looked at, and those whose first frames have been stored.
        self._waiting: list[tuple[int, Any]] = []
        self._stored: list[tuple[int, Any]] = []

    # --- between batches

    @property
    @override
    def earlier(self) -> dict[Key, Tensor]:
        return {key: recent.earlier for key, recent in self._recent.items()}

    @override
    def saved_rows(self) -> dict[str, Tensor]:
        rows = super().saved_rows()
        if not self._of_arrays:
            return rows
        return {name: row.transpose(0, 1) for name, row in rows.items()}

    @override
    def restart(self, mask: Any) -> None:
        for key, earlier in self.earlier.items():
            first = self._newest[key] if self._repeats else torch.zeros_like(self._newest[key])
            if mask is not None:
                # Without looking at the mask, which would wait for a device.
                chosen = torch.as_tensor(mask).view(-1, *[1] * (first.ndim - 1))
                first = torch.where(chosen, first, earlier)
            earlier.copy_(first)

    @override
    def first_read(self, key: Key) -> Tensor | None:
        if key not in self.leaves:
            return None
        return torch.stack(
            [*self.earlier[key], self._newest[key]], 1 + len(self.leaves[key].agents)
        )

    # --- a batch

    @override
    def begin(self, block: Block, view: StepArrays | StepTensors) -> StepArrays | StepTensors:
        block.windows, block.grown = self._recent, {}
        self._waiting, self._stored = [], []
        rows: dict[Key, Tensor] = {}
        for key, recent in self._recent.items():
            recent.begin()
            positions, pool, _ = self._place(block, key)
            frames = positions.frames_in(pool)
            pool[positions.zero] = 0
            size = positions.leaf.size
            frames[: size - 1] = recent.earlier
            frames[size - 1] = self._newest[key]
            rows[key], rows[next_of(key)] = recent.rows, frames[size:]
        return view.replaced(rows)

    def _place(self, block: Block, key: Key) -> tuple[_Positions, Tensor, int]:
        """Returns positions in the batch's own part of a pool, this part, and its beginning."""
        start, lease = block.lease.pool_starts.get(key, 0), block.lease
        rows = block.layout.pool_rows[key]
        return self._positions[key], lease.tensors[pool_key(key)][start : start + rows], start

    def write(self, index: int, row: int) -> None:
        """Notes that an episode of an environment begins in ``row``.

        Its first frame is not there yet.
        """
        self._waiting.append((row, [index]))

    @override
    def followers(self, start: int, stop: int) -> list[Follow]:
        begun, waiting = self._begun[start:stop].unbind(0), self._waiting
        if self._windows:

            def look(t: int, starts: Tensor) -> None:
                found = starts.numpy().nonzero()[0]
                if len(found):
                    waiting.append((start + t + 1, found))
                    self.settle()

            return [look]

        def note(t: int, starts: Tensor) -> None:
            begun[t].copy_(starts)

        return [note, *(one.follower(start, stop) for one in self._gathered)]

    def settle(self) -> None:
        """Stores the first frames of episodes that have begun, and completes their stacks."""
        if not self._waiting:
            return
        for row, envs in self._waiting:
            for windows in self._windows:
                windows.begin_stacks(row, envs)
        self._stored += self._waiting
        self._waiting.clear()

    @override
    def finish(self, block: Block, filled: int) -> None:
        self.settle()
        begun, order = self._episodes(filled)
        for key, recent in self._recent.items():
            positions, pool, start = self._place(block, key)
            roots, after = block.flat(key), block.flat(next_of(key))
            positions.write(roots, after, begun)
            roots[filled:] = after[filled:] = positions.zero
            if order is not None:
                first, leaf = recent.first_frames(order), positions.leaf
                # A frame may have no elements, so torch can't find the size of a dimension.
                first = first.reshape(len(first) * leaf.per_env, *leaf.frame.shape)
                begin, end = positions.zero + 1, positions.zero + 1 + len(first)
                if end <= len(pool):
                    pool[begin:end] = first
                else:
                    # The leased memory has no room for the first frames of all episodes.
                    block.grown[key], start = torch.cat([pool[:begin], first]), 0
            if start:
                roots.add_(start)
                after.add_(start)
            recent.end(filled)

    def _episodes(self, filled: int) -> tuple[Tensor | None, Tensor | None]:
        """Returns the episodes that begin in a batch.

        Returns:
            True where a row is the first of an episode, ``(steps, num_envs)``, and how to find
            their first frames in the order of the rows: numbers among those that were stored, or
            rows and environments. None if no episode begins.
        """
        if not self._windows:
            begun = self._begun
            # Row ``t`` marks the environments in which an episode begins after step ``t``.
            begun[max(filled - 1, 0) :] = False
            begun = torch.cat([torch.zeros_like(begun[:1]), begun[:-1]])
            episodes = begun.nonzero()
            return (begun, episodes) if len(episodes) else (None, None)
        if not self._stored:
            return None, None
        rows = np.repeat([row for row, _ in self._stored], [len(envs) for _, envs in self._stored])
        envs = np.concatenate([envs for _, envs in self._stored])
        # Those that begin after the batch belong to the next one.
        places, order = np.unique(rows * self._begun.shape[1] + envs, return_index=True)
        order = order[places < filled * self._begun.shape[1]]
        if not len(order):
            return None, None
        begun = torch.zeros_like(self._begun)
        begun[rows[order], envs[order]] = True
        return begun, torch.from_numpy(order)


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

    @abstractmethod
    def stacks(self, start: int, stop: int, envs: slice, copied: bool) -> InputRows:
        """Returns the stacks of the steps of a chunk, ``(*batch, *agents, size, *frame)``.

        See :class:`~trawl.rollout.block.StackRows`.
        """

    @abstractmethod
    def first_frames(self, order: Tensor) -> Tensor:
        """Returns the first frames of the episodes that begin within the batch.

        Args:
            order: what :class:`FrameStacks` knows of the episodes, in the order of the rows.
        """

    @abstractmethod
    def end(self, filled: int) -> None:
        """Ends a batch of ``filled`` steps, and sets ``earlier`` for the next one."""


class WindowedFrames(StackFrames):
    """Frames in which a stack is a window of consecutive frames, without a copy.

    If an episode begins, the frames before its first one are overwritten. To find the environments,
    the code looks at the flags, so it would wait for a GPU.

    Args:
        leaf: see :class:`StackFrames`.
        repeats: see :class:`StackFrames`.
        newest: see :class:`StackFrames`.
        steps: see :class:`StackFrames`.
        batch: batch size of the environments.
        settle: function that completes the stacks of episodes that have just begun.
        dense: True to give the policy contiguous stacks.
    """

    def __init__(
        self,
        leaf: StackedLeaf,
        repeats: bool,
        newest: Tensor,
        steps: int,
        batch: Sequence[int],
        settle: Callable[[], None],
        dense: bool,
    ) -> None:
        super().__init__(leaf, repeats, newest, steps)
        self._settle = settle
        self._array, self._last = as_array(self._memory), as_array(newest)
        self._firsts: list[Array] = []
        # (steps, *batch, *agents, size, *frame)
        moving = self._memory.unfold(0, leaf.size, 1).movedim(-1, 2 + len(leaf.agents))
        self._stacks = moving.unflatten(1, batch) if len(batch) else moving[:, 0]
        self._dense = dense and newest.shape[: 1 + len(leaf.agents)].numel() > 1
        self._copies: dict[tuple[Any, Any], InputCopies] = {}

    @override
    def begin(self) -> None:
        self._firsts = []

    @override
    def stacks(self, start: int, stop: int, envs: slice, copied: bool) -> InputRows:
        chosen, settle = self._stacks[start:stop], self._settle
        if envs != slice(None):
            chosen = chosen[:, envs]
        if copied:
            # The policy may keep its last input, so groups of environments have their own copies.
            part = envs.start, envs.stop
            copies = self._copies.setdefault(part, InputCopies(self._memory.dtype))
            copies.bind(_SettledArrays(as_array(chosen), settle))
            return copies
        rows, dense = chosen.unbind(0), self._dense

        def read(t: int) -> Tensor:
            settle()
            return rows[t].contiguous() if dense else rows[t]

        return LazyRows(read, len(rows))

    def begin_stacks(self, row: int, envs: Any) -> None:
        """Stores first frames, and begins the stacks of episodes whose first row is ``row``."""
        last = row + self._before
        first = (self._array[last] if row < self._steps else self._last)[envs]
        self._firsts.append(first)
        self._array[row:last, envs] = first if self._repeats else 0

    @override
    def first_frames(self, order: Tensor) -> Tensor:
        found = torch.from_numpy(np.concatenate(self._firsts)).view(self._memory.dtype)
        return found[order]

    @override
    def end(self, filled: int) -> None:
        found = self._memory[filled : filled + self._before]
        self.earlier.copy_(found if filled >= self._before else found.clone())


class _SettledArrays:
    """Rows of stacks as arrays.

    Args:
        rows: the stacks, with time first.
        settle: function to call before a row is read.
    """

    def __init__(self, rows: Array, settle: Callable[[], None]) -> None:
        self._rows, self._settle = rows, settle
        self.shape, self.dtype = rows.shape, rows.dtype

    def __getitem__(self, t: int) -> NDArray[Any]:
        self._settle()
        found: NDArray[Any] = self._rows[t]
        return found


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

    def follower(self, start: int, stop: int) -> Follow:
        """Returns a function that begins stacks, to call after each step of a chunk."""
        begun, row, first = self._start, self._row, start + self._leaf.size

        def write(t: int, starts: Tensor) -> None:
            begun.masked_fill_(starts, (first + t) * row)

        return write

    @override
    def first_frames(self, order: Tensor) -> Tensor:
        return self.rows[order[:, 0], order[:, 1]]

    @override
    def end(self, filled: int) -> None:
        # The row may have been cleared, like all rows after the last step.
        self._memory[self._before + filled].copy_(self._newest)
        windows = self._windows[filled][..., :-1]
        found = self._at(windows, (*self._lead[:-1], self._before))
        self.earlier.copy_(found.movedim(len(self._lead) - 1, 0))
