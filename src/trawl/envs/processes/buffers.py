"""Shared memory for the actions and results of environments in their own processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trawl.envs.entries.masks import differing_masks
from trawl.keys import Key, nested, show_key
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

#: Shapes and dtypes of entries, by key.
EntryLayouts = dict[Key, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class StepBufferSpec:
    """Description of the arrays in :class:`SharedStepBuffers`, which each process receives.

    Attributes:
        workers: number of processes.
        envs: number of environments in all processes.
        rows_per_env: number of rows of each environment; more than 1 if an environment is itself
            a batch.
        observed: shape and dtype of each entry that one environment shows after steps and resets,
            by key: observations, and flags of agents.
        rewards: shape and dtype of each reward of one environment, by key.
        acted: shape and dtype of each action of one environment, by key.
        choices: number of values of each choice in an action; empty if it can't have a mask.
    """

    workers: int
    envs: int
    rows_per_env: int
    observed: EntryLayouts
    rewards: EntryLayouts
    acted: EntryLayouts
    choices: tuple[int, ...]

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
        rows_per_env: number of rows of each environment.
        choices: number of values of each choice in an action; empty if it can't have a mask.
        observed: observations and agents' flags after the step, by key.
        reset_observed: the same after a reset, by key, valid in the rows that were reset.
        rewards: rewards of the step, by key.
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
        self.rows_per_env, self.choices = spec.rows_per_env, spec.choices
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
        # Memory that is never used takes no space.
        self.masks = {
            FLAT: self._array((rows, sum(spec.choices)), np.dtype(np.int8)),
            JOINT: self._array((rows, *(spec.joint or (0,))), np.dtype(np.int8)),
        }
        self.masked = self._array((rows,), np.dtype(np.uint8))
        self.rewards, self.observed, self.reset_observed = (
            {
                key: self._rows((rows, *shape), _numpy_dtype(dtype))
                for key, (shape, dtype) in found.items()
            }
            for found in (spec.rewards, spec.observed, spec.observed)
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
            # Earlier versions have saved rewards without their last dimension.
            array[chosen] = saved[name].numpy().reshape(-1, *array.shape[1:])

    def discard(self, rows: Any) -> None:
        """Clears the flags and rewards of rows whose step has failed."""
        for array in (self.flags, *self.rewards.values()):
            array[rows] = 0

    def _results(self, rows: Array, begun: Array) -> list[tuple[str, Array, Array]]:
        """Returns the names and arrays of results, and the rows that are read."""
        return [
            ("flags", self.flags, rows),
            *(
                ("rewards" if key == ("reward",) else f"rewards {show_key(key)}", one, rows)
                for key, one in self.rewards.items()
            ),
            *((f"step {show_key(key)}", one, rows) for key, one in self.observed.items()),
            *((f"reset {show_key(key)}", one, begun) for key, one in self.reset_observed.items()),
        ]

    def rows(self, env: int) -> slice:
        """Returns the rows of an environment."""
        count = self.rows_per_env
        return slice(env * count, (env + 1) * count)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


# --- results of steps


_ENDS = {"done": TERMINATED | TRUNCATED, "terminated": TERMINATED, "truncated": TRUNCATED}


@dataclass(frozen=True)
class StepEntries:
    """Memory for the results of a step.

    Attributes:
        begin: the entries with which the next step begins, unless :meth:`StepResults.write` found
            flags. They share their tensors with ``after``.
        after: the entries for ``"next"``.
        flags: the arrays of the flags.
        results: the arrays of the observations and rewards.
    """

    begin: dict[str, Any]
    after: dict[str, Any]
    flags: Sequence[Array]
    results: Sequence[Array]


class StepResults:
    """Copies the results of steps from shared memory, because the next step overwrites them.

    Args:
        buffers: the shared memory.
        batch_size: batch size of all environments together.
        flags: names of the flags.

    Attributes:
        no_bits: the flags of a step that has none.
    """

    def __init__(
        self, buffers: SharedStepBuffers, batch_size: torch.Size, flags: Sequence[str]
    ) -> None:
        self._ends = [_ENDS[name] for name in flags]
        results = {**buffers.observed, **buffers.rewards}
        self._sources, self._begun = (
            [array.reshape(*batch_size, *array.shape[1:]) for array in found.values()]
            for found in (results, buffers.reset_observed)
        )
        self._flags = buffers.flags.reshape(*batch_size, 1)
        self._nothing = bytes(self._flags.size)
        self.no_bits = np.zeros(self._flags.shape, np.uint8)
        # In this order, because a step begins with all entries but the rewards.
        self._keys = [*buffers.observed, *((name,) for name in flags), *buffers.rewards]
        self._flat = all(len(key) == 1 for key in self._keys)
        self._shapes = [(array.shape, array.dtype) for array in self._sources]

    def allocate(self) -> StepEntries:
        """Returns memory for the results of a step, in which all flags are False."""
        results = [np.empty(shape, dtype) for shape, dtype in self._shapes]
        flags, shown = self._no_flags(), len(self._begun)
        tensors = [*map(torch.from_numpy, (*results[:shown], *flags, *results[shown:]))]
        begin, after = self._entries(tensors[: shown + len(flags)]), self._entries(tensors)
        return StepEntries(begin, after, flags, results)

    def write(self, entries: StepEntries) -> Array:
        """Writes the results of a step.

        Returns:
            The flags of the step, one byte for each environment; ``no_bits`` if there are none.
        """
        for target, source in zip(entries.results, self._sources, strict=True):
            target[...] = source
        if self._flags.tobytes() == self._nothing:
            return self.no_bits
        bits = self._flags.copy()
        self._write_flags(entries.flags, bits)
        return bits

    def to_go_on_from(self, bits: Array) -> dict[str, Any]:
        """Returns the entries with which the next step begins.

        Args:
            bits: the flags of the step, which has reset the environments whose episodes ended.
        """
        rows = bits[..., 0] & RESET != 0
        observed = []
        for source, begun in zip(self._sources, self._begun, strict=False):
            array = source.copy()
            array[rows] = begun[rows]
            observed.append(array)
        flags = self._no_flags()
        self._write_flags(flags, np.where(rows[..., None], np.uint8(0), bits))
        return self._entries(map(torch.from_numpy, (*observed, *flags)))

    def after_reset(self) -> dict[str, Any]:
        """Returns the observations of the last resets."""
        return self._entries(torch.from_numpy(array.copy()) for array in self._begun)

    def _no_flags(self) -> list[Array]:
        return [np.zeros(self._flags.shape, np.bool_) for _ in self._ends]

    def _write_flags(self, flags: Sequence[Array], bits: Array) -> None:
        for target, mask in zip(flags, self._ends, strict=True):
            target[...] = bits & mask

    def _entries(self, tensors: Iterable[Tensor]) -> dict[str, Any]:
        """Returns the first entries of a step, nested as in a TensorDict."""
        found = zip(self._keys, tensors, strict=False)
        return {key[0]: value for key, value in found} if self._flat else nested(dict(found))
