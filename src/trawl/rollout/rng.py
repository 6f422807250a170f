"""Stream of random numbers for one collector, drawn through the global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trawl.envs.generators import as_data, from_data, get_states, set_states
from trawl.envs.seeding import derive


class RandomStream:
    """State of the global generators (torch, numpy, random) for one collector.

    Policies draw from global generators. Between its turns, a stream keeps its own state of these
    generators, so that its numbers and all other draws are independent of each other.

    Args:
        seed: seed of the stream.
        device: a CUDA device whose generator belongs to the stream too, or None.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._cuda = device if device is not None and device.type == "cuda" else None
        outside = self._get_states()
        torch.manual_seed(derive(seed, "torch"))
        np.random.seed(derive(seed, "numpy"))
        random.seed(derive(seed, "python"))
        self._state = self._get_states()
        self._set_states(outside)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the stream."""
        return as_data(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` returned."""
        self._state = from_data(state, self._state)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Makes the global generators draw from this stream within a ``with`` block."""
        outside = self._get_states()
        self._set_states(self._state)
        try:
            yield
        finally:
            self._state = self._get_states()
            self._set_states(outside)

    def _get_states(self) -> tuple[Any, ...]:
        return get_states(self._cuda)

    def _set_states(self, state: tuple[Any, ...]) -> None:
        set_states(state, self._cuda)
