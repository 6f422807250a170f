"""Results of steps in shared memory, as the entries of TensorDicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trawl.envs.step_buffers import RESET, TERMINATED, TRUNCATED, SharedStepBuffers
from trawl.keys import Key, nested
from trawl.memory import Array

_ENDS = {"done": TERMINATED | TRUNCATED, "terminated": TERMINATED, "truncated": TRUNCATED}


@dataclass(frozen=True)
class StepEntries:
    """Memory for the results of a step.

    Attributes:
        begin: the entries with which the next step begins, unless :meth:`StepResults.write` found
            flags. They share their tensors with ``after``.
        after: the entries for ``"next"``.
        observed: the arrays of the observations.
        rewards: the array of the rewards.
        flags: the arrays of the flags.
    """

    begin: dict[str, Any]
    after: dict[str, Any]
    observed: Sequence[Array]
    rewards: Array
    flags: Sequence[Array]


class StepResults:
    """Copies the results of steps from shared memory, because the next step overwrites them.

    Args:
        buffers: the shared memory.
        batch_size: batch size of all environments together.
        flags: names of the flags.
    """

    def __init__(
        self, buffers: SharedStepBuffers, batch_size: torch.Size, flags: Sequence[str]
    ) -> None:
        self._ends = {name: _ENDS[name] for name in flags}
        self._observed, self._begun = (
            {key: array.reshape(*batch_size, *array.shape[1:]) for key, array in found.items()}
            for found in (buffers.observed, buffers.reset_observed)
        )
        self._rewards, self._flags = (
            array.reshape(*batch_size, 1) for array in (buffers.rewards, buffers.flags)
        )
        self._nothing = bytes(self._flags.size)
        self._flat = all(len(key) == 1 for key in self._observed)
        self._sources = list(self._observed.values())
        self._shapes = [(array.shape, array.dtype) for array in self._sources]

    def allocate(self) -> StepEntries:
        """Returns memory for the results of a step, in which all flags are False."""
        observed = [np.empty(shape, dtype) for shape, dtype in self._shapes]
        rewards = np.empty_like(self._rewards, order="C")
        flags = [self._no_flags() for _ in self._ends]
        begin = self._entries(observed, flags)
        after = {**begin, "reward": torch.from_numpy(rewards)}
        return StepEntries(begin, after, observed, rewards, flags)

    def write(self, entries: StepEntries) -> Array | None:
        """Writes the results of a step.

        Returns:
            The flags of the step, one byte for each environment; None if there are none.
        """
        for target, source in zip(entries.observed, self._sources, strict=True):
            target[...] = source
        entries.rewards[...] = self._rewards
        if self._flags.tobytes() == self._nothing:
            return None
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
        for source, begun in zip(self._sources, self._begun.values(), strict=True):
            array = source.copy()
            array[rows] = begun[rows]
            observed.append(array)
        flags = [self._no_flags() for _ in self._ends]
        self._write_flags(flags, np.where(rows[..., None], np.uint8(0), bits))
        return self._entries(observed, flags)

    def after_reset(self) -> dict[str, Any]:
        """Returns the observations of the last resets."""
        return self._nested([array.copy() for array in self._begun.values()])

    def _no_flags(self) -> Array:
        return np.zeros(self._flags.shape, np.bool_)

    def _write_flags(self, flags: Sequence[Array], bits: Array) -> None:
        for target, mask in zip(flags, self._ends.values(), strict=True):
            target[...] = bits & mask

    def _entries(self, observed: Sequence[Array], flags: Sequence[Array]) -> dict[str, Any]:
        found = self._nested(observed)
        found.update(zip(self._ends, map(torch.from_numpy, flags), strict=True))
        return found

    def _nested(self, arrays: Sequence[Array]) -> dict[str, Any]:
        tensors: dict[Key, Any] = dict(
            zip(self._observed, map(torch.from_numpy, arrays), strict=True)
        )
        if self._flat:
            return {key[0]: tensor for key, tensor in tensors.items()}
        return nested(tensors)
