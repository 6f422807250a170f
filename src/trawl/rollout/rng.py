"""Stream of random numbers for one collector, drawn through the global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

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
        self._device = device
        outside = _get_states(device)
        torch.manual_seed(derive(seed, "torch"))
        np.random.seed(derive(seed, "numpy"))
        random.seed(derive(seed, "python"))
        self._state = _get_states(device)
        _set_states(outside, device)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the stream."""
        return as_data(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` returned."""
        self._state = from_data(state, self._state)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Makes the global generators draw from this stream within a ``with`` block."""
        outside = _get_states(self._device)
        _set_states(self._state, self._device)
        try:
            yield
        finally:
            self._state = _get_states(self._device)
            _set_states(outside, self._device)


def global_state(device: torch.device | None) -> dict[str, Any]:
    """Returns the state of the global generators, from which collectors without a seed draw.

    Args:
        device: a CUDA device whose generator belongs to the state too, or None.
    """
    return as_data(_get_states(device))


def set_global_state(state: Mapping[str, Any], device: torch.device | None) -> None:
    """Restores a state that :func:`global_state` returned."""
    _set_states(from_data(state, _get_states(device)), device)


def _get_states(device: torch.device | None) -> tuple[Any, ...]:
    cuda = device is not None and device.type == "cuda"
    own = torch.cuda.get_rng_state(device or "cuda") if cuda else None
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), own


def _set_states(state: tuple[Any, ...], device: torch.device | None) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state(state[3], device or "cuda")


def as_data(state: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the states of the generators as tensors, numbers and lists."""
    torch_state, (name, keys, *rest), (version, inner, gauss), cuda = state
    data = {
        "torch": torch_state,
        "numpy": {"name": str(name), "keys": keys.tolist(), "rest": list(rest)},
        "python": {"version": version, "inner": list(inner), "gauss": gauss},
    }
    return data if cuda is None else {**data, "cuda": cuda}


def from_data(data: Mapping[str, Any], before: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the states that :func:`as_data` converted.

    Args:
        data: the converted states.
        before: states of the same generators. Its CUDA state is kept if ``data`` has none.
    """
    numpy_state, python_state = data["numpy"], data["python"]
    keys = np.array(numpy_state["keys"], dtype=np.uint32)
    cuda = before[3]
    return (
        data["torch"].cpu(),
        (numpy_state["name"], keys, *numpy_state["rest"]),
        (python_state["version"], tuple(python_state["inner"]), python_state["gauss"]),
        None if cuda is None else data.get("cuda", cuda),
    )
