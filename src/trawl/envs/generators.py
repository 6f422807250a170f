"""States of the global generators of random numbers (torch, numpy, random), also as plain data."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch

from trawl.envs.seeding import derive


class Seeded(Protocol):
    """Source of torch's random numbers that belongs to one thread."""

    def seed(self, seed: int) -> None:
        """Seeds it anew."""


#: What this thread draws torch's numbers from; None if the global generators are its own.
draws_privately: ContextVar[Seeded | None] = ContextVar("draws_privately", default=None)


def global_state(device: torch.device | None = None) -> dict[str, Any]:
    """Returns the state of the global generators as plain data.

    Args:
        device: a device. If it is a CUDA device, the state of its generator is included.
    """
    return as_data(get_states(device))


def set_global_state(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restores a state that :func:`global_state` returned."""
    set_states(from_data(state, get_states(device)), device)


def seed_generators(seed: int) -> None:
    """Seeds the global generators, each with a seed of its own that is derived from ``seed``."""
    torch.manual_seed(derive(seed, "torch"))
    np.random.seed(derive(seed, "numpy"))
    random.seed(derive(seed, "python"))


def get_states(device: torch.device | None = None) -> tuple[Any, ...]:
    """Returns the states of the global generators of torch, numpy and random.

    Args:
        device: a device. If it is a CUDA device, the state of its generator is included.
    """
    cuda = device is not None and device.type == "cuda"
    own = torch.cuda.get_rng_state(device or "cuda") if cuda else None
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), own


def set_states(states: tuple[Any, ...], device: torch.device | None = None) -> None:
    """Sets the states that :func:`get_states` returned."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state(states[3], device or "cuda")


def as_data(states: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the states of the generators as tensors, numbers and bytes."""
    torch_state, (name, keys, *rest), (version, inner, gauss), cuda = states
    data = {
        "torch": torch_state,
        "numpy": {"name": str(name), "keys": _packed(keys), "rest": list(rest)},
        "python": {"version": version, "inner": _packed(inner), "gauss": gauss},
    }
    return data if cuda is None else {**data, "cuda": cuda}


def from_data(data: Mapping[str, Any], before: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the states that :func:`as_data` converted.

    Args:
        data: the converted states.
        before: states of the same generators. Its CUDA state is kept if ``data`` has none.
    """
    numpy_state, python_state = data["numpy"], data["python"]
    keys = np.array(_unpacked(numpy_state["keys"]), dtype=np.uint32)
    cuda = before[3]
    return (
        data["torch"].cpu(),
        (numpy_state["name"], keys, *numpy_state["rest"]),
        (python_state["version"], tuple(_unpacked(python_state["inner"])), python_state["gauss"]),
        None if cuda is None else data.get("cuda", cuda),
    )


def _packed(numbers: Any) -> bytes:
    """Returns 32-bit numbers as bytes, which take less space than a list."""
    return np.array(numbers, dtype="<u4").tobytes()


def _unpacked(data: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(data, dtype="<u4").tolist()
    return numbers


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
