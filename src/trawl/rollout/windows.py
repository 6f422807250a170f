"""Stacks of frames that a policy reads as windows of consecutive frames, without a copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trawl.memory import Array
from trawl.rollout.policy_inputs import InputCopies, InputRows, LazyRows


class _WindowArrays:
    """Rows of stacks as numpy arrays.

    Args:
        rows: the stacks, ``(steps, *batch, size, *frame)``.
        prepare: function that completes the stacks of episodes that have just begun; it is called
            before a row is read.
    """

    def __init__(self, rows: Array, prepare: Callable[[], None]) -> None:
        self._rows = rows
        self._prepare = prepare
        self.shape = rows.shape
        self.dtype = rows.dtype

    def __getitem__(self, t: int) -> Array:
        self._prepare()
        row: Array = self._rows[t]
        return row


class _WindowTensors(Sequence[Tensor]):
    """Rows of stacks as tensors."""

    def __init__(self, rows: Sequence[Tensor], prepare: Callable[[], None]) -> None:
        self._rows = rows
        self._prepare = prepare

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, t: Any) -> Any:
        self._prepare()
        return self._rows[t]


class Windows:
    """Stacks of an observation, as windows that move over the frames of each environment.

    Args:
        frames: frames of each environment, ``(num_envs, size + steps, *agents, *frame)``.
        size: number of frames in a stack.
        agents: number of agents in a group, as a dimension; ``()`` if there are no groups.
        batch: batch size of the environments.
        prepare: function that completes the stacks of episodes that have just begun.
    """

    def __init__(
        self,
        frames: Array,
        size: int,
        agents: tuple[int, ...],
        batch: tuple[int, ...],
        prepare: Callable[[], None],
    ) -> None:
        self._prepare = prepare
        self._contiguous = math.prod((*batch, *agents)) == 1
        axis = 2 + len(agents)
        # (num_envs, steps + 1, *agents, *frame, size), and then with time first.
        moving = torch.from_numpy(frames).unfold(1, size, 1).movedim(-1, axis).movedim(1, 0)
        self._stacks = moving.unflatten(1, batch) if batch else moving[:, 0]
        self._copies: dict[tuple[Any, Any], InputCopies] = {}

    def stacks(self, start: int, stop: int, envs: slice, copied: bool) -> InputRows:
        """Returns the stacks of some rows; see :class:`~trawl.rollout.block.StackRows`."""
        chosen = self._chosen(start, stop, envs)
        if copied:
            # The policy may keep its last input, so groups of environments have their own copies.
            copies = self._copies.setdefault((envs.start, envs.stop), InputCopies(None))
            copies.bind(_WindowArrays(chosen.numpy(), self._prepare))
            return copies
        rows = _WindowTensors(chosen.unbind(0), self._prepare)
        if self._contiguous:
            return rows
        return LazyRows(lambda t: rows[t].contiguous(), len(rows))

    def _chosen(self, start: int, stop: int, envs: slice) -> Tensor:
        rows = self._stacks[start:stop]
        return rows if envs == slice(None) else rows[:, envs]
