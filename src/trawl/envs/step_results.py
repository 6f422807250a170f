"""Results of steps in shared memory, as the entries of TensorDicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trawl.envs.step_buffers import RESET, TERMINATED, TRUNCATED, SharedStepBuffers
from trawl.keys import Key, nested
from trawl.memory import Array

_ENDS = {"done": TERMINATED | TRUNCATED, "terminated": TERMINATED, "truncated": TRUNCATED}


class StepResults:
    """Copies the results of steps from shared memory, because the next step overwrites them.

    Args:
        buffers: the shared memory.
        batch_size: batch size of all environments together.
    """

    def __init__(self, buffers: SharedStepBuffers, batch_size: torch.Size) -> None:
        self._observed, self._begun = (
            {key: array.reshape(*batch_size, *array.shape[1:]) for key, array in found.items()}
            for found in (buffers.observed, buffers.reset_observed)
        )
        self._rewards, self._flags = (
            array.reshape(*batch_size, 1) for array in (buffers.rewards, buffers.flags)
        )
        self._no_flags = np.zeros(self._flags.shape, np.bool_)
        self._nothing = self._no_flags.tobytes()
        self._flat = all(len(key) == 1 for key in self._observed)

    def flags(self) -> Array:
        """Returns the flags of the last step, one byte for each environment."""
        return self._flags.copy()

    def after_step(self, bits: Array) -> dict[str, Any]:
        """Returns the entries for ``"next"``.

        Args:
            bits: the flags of the step.
        """
        observed = {key: array.copy() for key, array in self._observed.items()}
        return self._entries(observed, bits) | {"reward": torch.from_numpy(self._rewards.copy())}

    def to_go_on_from(self, bits: Array, after: dict[str, Any]) -> dict[str, Any]:
        """Returns the entries with which the next step begins.

        Args:
            bits: the flags of the step, which has reset the environments whose episodes ended.
            after: the entries that :meth:`after_step` has returned.
        """
        if bits.tobytes() == self._nothing:
            return {key: value for key, value in after.items() if key != "reward"}
        rows = bits[..., 0] & RESET != 0
        observed = {}
        for key, array in self._observed.items():
            observed[key] = begin = array.copy()
            begin[rows] = self._begun[key][rows]
        bits = bits.copy()
        bits[rows] = 0
        return self._entries(observed, bits)

    def after_reset(self) -> dict[str, Any]:
        """Returns the observations of the last resets."""
        return self._nested({key: array.copy() for key, array in self._begun.items()})

    def _entries(self, observed: dict[Key, Array], bits: Array) -> dict[str, Any]:
        found = self._nested(observed)
        if bits.tobytes() == self._nothing:
            for name in _ENDS:
                found[name] = torch.from_numpy(self._no_flags.copy())
        else:
            for name, mask in _ENDS.items():
                found[name] = torch.from_numpy(bits & mask != 0)
        return found

    def _nested(self, arrays: dict[Key, Array]) -> dict[str, Any]:
        if self._flat:
            return {key[0]: torch.from_numpy(array) for key, array in arrays.items()}
        return nested({key: torch.from_numpy(array) for key, array in arrays.items()})
