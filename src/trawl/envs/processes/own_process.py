"""Preparation of processes that run environments."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch

from trawl.registry import leave_warnings_to_driver


def parent_registry() -> dict[str, Any]:
    """Returns the environments registered in this process, except Gymnasium's own."""
    return {
        name: replace(spec)
        for name, spec in gymnasium.registry.items()
        if not str(spec.entry_point).startswith("gymnasium.")
    }


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
        gymnasium.registry.setdefault(name, spec)
