"""The memory in which an environment's process and its owner put what a step takes and gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trawl.keys import Key

Array = NDArray[Any]

# What the flags of a row say.
TERMINATED, TRUNCATED, RESET, SPENT = 1, 2, 4, 8

_ALIGNMENT = 64
# A policy may write its actions in another dtype than the environment's, up to this size.
_WIDEST = 8


@dataclass(frozen=True)
class AreaPlan:
    """What lies in an area; it can be sent.

    Attributes:
        workers: number of processes.
        lanes: environments in each.
        observed: shape and dtype of each observation, for one environment.
        acted: the same of the actions.
    """

    workers: int
    lanes: int
    observed: dict[Key, tuple[tuple[int, ...], torch.dtype]]
    acted: dict[Key, tuple[tuple[int, ...], torch.dtype]]

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return Area(self, None).nbytes


class Area:
    """The arrays of all processes, each with a row for each environment.

    Two areas hold observations: what a step led to, and how an episode begins. A process that
    resets its environment after the last step of an episode so has a place for either.

    Args:
        plan: what lies there.
        buffer: the memory; None to find out how much is needed.

    Attributes:
        observed: observations after the step, by key.
        begun: observations after a reset, by key, valid in the rows that were reset.
        rewards: float32.
        flags: a byte for each row, of ``TERMINATED``, ``TRUNCATED``, ``RESET`` (the row was reset
            after the step) and ``SPENT`` (the step was none, but a reset).
        actions: the actions, by key, and ``action_dtypes`` their dtypes.
        cut: whether the row is to be reset after the step in any case.
        eager: a byte: whether rows are reset after the step that ends their episode.
        number: the number of the step that is to be taken.
        answers: the number of the last step that each process took; negative if it failed.
        nbytes: size of the memory.
    """

    def __init__(self, plan: AreaPlan, buffer: Any) -> None:
        self.action_dtypes: dict[Key, np.dtype[Any]]
        self.actions: dict[Key, Array]
        self._plan = plan
        self._buffer = buffer
        self.nbytes = 0
        rows = plan.workers * plan.lanes
        numbers = np.dtype(np.int64)
        self.number = self._array((1,), numbers).data
        self.answers = self._array((plan.workers,), numbers).data
        self.eager = self._array((1,), np.dtype(np.uint8)).data
        self.flags = self._array((rows,), np.dtype(np.uint8))
        self.cut = self._array((rows,), np.dtype(np.bool_))
        self.rewards = self._array((rows,), np.dtype(np.float32))
        self.observed, self.begun = (
            {
                key: self._array((rows, *shape), _numpy_dtype(dtype))
                for key, (shape, dtype) in plan.observed.items()
            }
            for _ in range(2)
        )
        self._acted: dict[Key, tuple[Array, tuple[int, ...]]] = {}
        for key, (shape, _) in plan.acted.items():
            whole = (rows, *shape)
            memory = self._array((math.prod(whole) * _WIDEST,), np.dtype(np.uint8))
            self._acted[key] = memory, whole
        self.take_actions_as({key: _numpy_dtype(dtype) for key, (_, dtype) in plan.acted.items()})

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        offset, count = self.nbytes, math.prod(shape)
        self.nbytes += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self._buffer is None or not count:
            return np.zeros(shape, dtype)
        return np.frombuffer(self._buffer, dtype, count, offset).reshape(shape)

    def take_actions_as(self, dtypes: Mapping[Key, np.dtype[Any]]) -> None:
        """From now on, actions are of these dtypes."""
        self.action_dtypes = dict(dtypes)
        self.actions = {}
        for key, (memory, shape) in self._acted.items():
            dtype = dtypes[key]
            self.actions[key] = (
                memory[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            )

    def rows(self, worker: int) -> slice:
        """The rows of a process."""
        return slice(worker * self._plan.lanes, (worker + 1) * self._plan.lanes)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
