"""Stream of random numbers for one collector, drawn through the global generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trawl.envs.generators import as_data, from_data, get_states, seed_generators, set_states


class RandomStream:
    """State of the global generators (torch, numpy, random) for one collector.

    Policies draw from global generators. Between its turns, a stream keeps its own state of these
    generators, so that its numbers and all other draws are independent of each other.

    Args:
        seed: seed of the stream.
        device: a CUDA device whose generator belongs to the stream too, or None.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._device = device
        outside = get_states(device)
        seed_generators(seed)
        self._state = get_states(device)
        set_states(outside, device)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the stream."""
        return as_data(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` returned."""
        self._state = from_data(state, self._state)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Makes the global generators draw from this stream within a ``with`` block."""
        outside = get_states(self._device)
        set_states(self._state, self._device)
        try:
            yield
        finally:
            self._state = get_states(self._device)
            set_states(outside, self._device)
