"""Preparation of processes that run environments."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec

from trawl.backends.processes.payload import packed
from trawl.registry import leave_warnings_to_driver


def parent_registry() -> dict[str, Any]:
    """Returns the environments registered in this process, except Gymnasium's own.

    What refers to objects of the program is pickled by itself: a process that can't import an
    object misses the environments of that object alone.
    """
    return {
        name: replace(spec) if _is_text(spec) else _packed(spec)
        for name, spec in gymnasium.registry.items()
        if not str(spec.entry_point).startswith("gymnasium.")
    }


def _is_text(spec: EnvSpec) -> bool:
    """Returns True if a specification names what it needs, and has no objects of the program."""
    values = (spec.entry_point, *spec.kwargs.values(), *spec.additional_wrappers)
    return all(value is None or isinstance(value, str | int | float) for value in values)


def _packed(spec: EnvSpec) -> bytes | EnvSpec:
    try:
        return packed(spec)
    except Exception as error:
        return _missing(spec.id, f"can't be sent to another process: {error}")


def _unpacked(name: str, spec: bytes | EnvSpec) -> EnvSpec:
    if not isinstance(spec, bytes):
        return spec
    try:
        found: EnvSpec = pickle.loads(spec)
    except Exception as error:
        return _missing(name, f"can't be made here: {type(error).__name__}: {error}")
    return found


def _missing(name: str, reason: str) -> EnvSpec:
    """The specification of an environment that fails when it is made."""
    return EnvSpec(name, partial(_fail, f"{name} is registered in the program, but {reason}"))


def _fail(message: str, **kwargs: Any) -> Any:
    raise RuntimeError(message)


def prepare_process(threads: int, registry: Mapping[str, Any]) -> None:
    """Prepares this process to run an environment or a worker.

    Args:
        threads: number of threads that torch may use.
        registry: environments registered in the parent process, to be registered here too.
    """
    leave_warnings_to_driver()
    torch.set_num_threads(threads)
    # Processes forked from one server would otherwise all draw the same random numbers.
    torch.seed()
    random.seed()
    np.random.seed()
    for name, spec in registry.items():
        if name not in gymnasium.registry:
            gymnasium.registry[name] = _unpacked(name, spec)
