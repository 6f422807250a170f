"""What a process needs before an environment lives in it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch


def parent_registry() -> dict[str, Any]:
    """The Gymnasium environments that were registered here, beside Gymnasium's own."""
    return {
        name: replace(spec)
        for name, spec in gymnasium.registry.items()
        if not str(spec.entry_point).startswith("gymnasium.")
    }


def take_process(threads: int, registry: Mapping[str, Any]) -> None:
    """Makes this process one's own.

    Args:
        threads: threads of torch.
        registry: environments that the parent knows, and this process may not.
    """
    torch.set_num_threads(threads)
    # A fork would draw the same numbers as all the others.
    torch.seed()
    random.seed()
    np.random.seed()
    for name, spec in registry.items():
        gymnasium.registry.setdefault(name, spec)
