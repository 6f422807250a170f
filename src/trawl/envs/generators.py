"""States of the global generators of random numbers (torch, numpy, random) as plain data."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def get_states(cuda: torch.device | None = None) -> tuple[Any, ...]:
    """Returns the states of the global generators of torch, numpy and random.

    Args:
        cuda: a CUDA device whose generator's state is returned as well, or None.
    """
    own = None if cuda is None else torch.cuda.get_rng_state(cuda)
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), own


def set_states(states: tuple[Any, ...], cuda: torch.device | None = None) -> None:
    """Sets the states that :func:`get_states` returned."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state(states[3], cuda or "cuda")


def as_data(states: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the states of the generators as tensors, numbers and lists."""
    torch_state, (name, keys, *rest), (version, inner, gauss), cuda = states
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
