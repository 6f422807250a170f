"""Shared memory for the actions and results of environments in their own processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trawl.envs.masks import differing_masks
from trawl.keys import Key, show_key
from trawl.memory import Array, aligned

# Bits in the flags of a row.
TERMINATED, TRUNCATED, RESET, AUTORESET = 1, 2, 4, 8

# Kinds of action masks: flat, or with a dimension for each choice.
UNMASKED, FLAT, JOINT = 0, 1, 2

#: Largest number of entries in a mask with an entry for each combination of values.
MOST_COMBINATIONS = 2**16

# Size in bytes of the largest dtype that an action may have. The dtype of a policy's actions may
# differ from the environment's.
_WIDEST = 8


@dataclass(frozen=True)
class StepBufferSpec:
    """Description of the arrays in :class:`SharedStepBuffers`, which each process receives.

    Attributes:
        workers: number of processes.
        envs: number of environments in all processes.
        rows_per_env: number of rows of each environment; more than 1 if an environment is itself
            a batch.
        observed: shape and dtype of each observation of one environment, by key.
        acted: shape and dtype of each action of one environment, by key.
        choices: number of values of each choice in an action; empty if it can't have a mask.
        reward: dtype of the rewards.
    """

    workers: int
    envs: int
    rows_per_env: int
    observed: dict[Key, tuple[tuple[int, ...], torch.dtype]]
    acted: dict[Key, tuple[tuple[int, ...], torch.dtype]]
    choices: tuple[int, ...]
    reward: torch.dtype = torch.float32

    @property
    def joint(self) -> tuple[int, ...]:
        """Shape of a mask with an entry for each combination of values; empty if there is none."""
        several = len(self.choices) > 1 and math.prod(self.choices) <= MOST_COMBINATIONS
        return self.choices if several else ()

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return SharedStepBuffers(self, None).nbytes


class SharedStepBuffers:
    """Arrays in memory shared by all processes, with one row for each environment.

    Observations have two sets of arrays: one for steps, and one for resets. A process that resets
    its environment after the last step of an episode writes to both.

    Args:
        spec: description of the arrays in the memory.
        buffer: the memory, as a writable buffer; None to compute only the required size.

    Attributes:
        observed: observations after the step, by key.
        reset_observed: observations after a reset, by key, valid in the rows that were reset.
        rewards: rewards of the step.
        masks: action masks for the next step, by kind. Flat masks have the values of all choices
            one after the other. Joint masks have a dimension for each choice. An entry of 2
            allows both values of a bit.
        masked: the kind of each row's masks: ``UNMASKED``, ``FLAT`` or ``JOINT``.
        flags: one byte for each row. Its bits are ``TERMINATED``, ``TRUNCATED``, ``RESET``
            (the row was reset after the step) and ``AUTORESET`` (the step was a reset).
        actions: the actions, by key.
        action_dtypes: dtypes of the actions, by key.
        cut: True for rows to be reset after the step even if their episode has not ended.
        episodes: number of the next episode of each row, if the processes count episodes.
        eager: one byte; nonzero if rows are reset in the step that ends their episode.
        numbers: for each process, the number of the step to be taken.
        answers: for each process, the number of its last step, negated if the step failed.
        nbytes: size of the memory in bytes.
    """

    def __init__(self, spec: StepBufferSpec, buffer: Any) -> None:
        self.action_dtypes: dict[Key, np.dtype[Any]]
        self.actions: dict[Key, Array]
        self._plan = spec
        self._buffer = buffer
        self.nbytes = 0
        rows = spec.envs * spec.rows_per_env
        numbers = np.dtype(np.int64)
        self.numbers = self._rows((spec.workers,), numbers).data
        self.answers = self._rows((spec.workers,), numbers).data
        self.eager = self._array((1,), np.dtype(np.uint8)).data
        self.flags = self._rows((rows,), np.dtype(np.uint8))
        self.cut = self._array((rows,), np.dtype(np.bool_))
        self.episodes = self._array((rows,), numbers)
        self.rewards = self._rows((rows,), _numpy_dtype(spec.reward))
        # Memory that is never used takes no space.
        self.masks = {
            FLAT: self._array((rows, sum(spec.choices)), np.dtype(np.int8)),
            JOINT: self._array((rows, *(spec.joint or (0,))), np.dtype(np.int8)),
        }
        self.masked = self._array((rows,), np.dtype(np.uint8))
        self.observed, self.reset_observed = (
            {
                key: self._rows((rows, *shape), _numpy_dtype(dtype))
                for key, (shape, dtype) in spec.observed.items()
            }
            for _ in range(2)
        )
        self._acted: dict[Key, tuple[Array, tuple[int, ...]]] = {}
        for key, (shape, _) in spec.acted.items():
            whole = (rows, *shape)
            memory = self._array((math.prod(whole) * _WIDEST,), np.dtype(np.uint8))
            self._acted[key] = memory, whole
        self.set_action_dtypes({key: _numpy_dtype(dtype) for key, (_, dtype) in spec.acted.items()})

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        offset, count = self.nbytes, math.prod(shape)
        self.nbytes += aligned(count * dtype.itemsize)
        if self._buffer is None or not count:
            return np.zeros(shape, dtype)
        return np.frombuffer(self._buffer, dtype, count, offset).reshape(shape)

    def _rows(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns an array whose rows are on cache lines of their own.

        Otherwise, processes that write neighbouring rows would wait for each other.
        """
        rows, *rest = shape
        size = math.prod(rest) * dtype.itemsize
        lines = self._array((rows, aligned(size)), np.dtype(np.uint8))
        return lines[:, :size].view(dtype).reshape(shape) if size else np.zeros(shape, dtype)

    def set_action_dtypes(self, dtypes: Mapping[Key, np.dtype[Any]]) -> None:
        """Changes the dtypes of the actions."""
        self.action_dtypes = dict(dtypes)
        self.actions = {}
        for key, (memory, shape) in self._acted.items():
            dtype = dtypes[key]
            self.actions[key] = (
                memory[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            )

    def action_masks(self) -> Array | None:
        """Returns action masks, with a row for each environment.

        A row without a mask allows every action. Returns None if there are no masks.

        Raises:
            ValueError: if the kinds of the masks differ.
        """
        kind = int(self.masked.max(initial=UNMASKED))
        if kind == UNMASKED:
            return None
        masks, others = self.masks[kind], self.masked != kind
        if others.any():
            if self.masked[others].any():
                raise differing_masks([self.masks[one].shape[1:] for one in (JOINT, FLAT)])
            masks[others] = 2
        return masks

    def read_results(self, rows: Array, begun: Array) -> dict[str, Tensor]:
        """Returns copies of results.

        Args:
            rows: rows whose last step is read.
            begun: rows whose last reset is read.
        """
        found = self._results(rows, begun)
        return {name: torch.from_numpy(array[chosen]) for name, array, chosen in found}

    def write_results(self, rows: Array, begun: Array, saved: Mapping[str, Tensor]) -> None:
        """Restores results that :meth:`read_results` has returned for the same rows."""
        for name, array, chosen in self._results(rows, begun):
            array[chosen] = saved[name].numpy()

    def _results(self, rows: Array, begun: Array) -> list[tuple[str, Array, Array]]:
        """Returns the names and arrays of results, and the rows that are read."""
        return [
            ("flags", self.flags, rows),
            ("rewards", self.rewards, rows),
            *((f"step {show_key(key)}", one, rows) for key, one in self.observed.items()),
            *((f"reset {show_key(key)}", one, begun) for key, one in self.reset_observed.items()),
        ]

    @property
    def rows_per_env(self) -> int:
        """Number of rows of each environment."""
        return self._plan.rows_per_env

    @property
    def choices(self) -> tuple[int, ...]:
        """Number of values of each choice in an action; empty if it can't have a mask."""
        return self._plan.choices

    def rows(self, env: int) -> slice:
        """Returns the rows of an environment."""
        count = self.rows_per_env
        return slice(env * count, (env + 1) * count)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
