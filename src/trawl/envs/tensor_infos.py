"""Layout of the entries of the info of vector environments whose data are tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from trawl.envs.final_obs import FINAL_OBS, marks_presence
from trawl.envs.info_keys import InfoEntry, box, placed_entries
from trawl.envs.infos import InfoLayout

# Random steps that are taken to see values, at most.
_STEPS = 1000
_FINAL_INFO = "final_info"


def tensor_layout(
    env: Any, given: Sequence[InfoEntry], info: Any, step: Callable[[Any], list[Any]]
) -> tuple[InfoLayout, bool]:
    """Finds the layout of entries of the info.

    Args:
        env: the environment, which was reset.
        given: the entries that :class:`~trawl.envs.TorchVectorEnv` was given.
        info: the info of the reset.
        step: function that takes a random step after an info, and returns the infos of this step
            and of the reset that may follow it.

    Returns:
        The layout; and True if the environment was stepped.

    Raises:
        ValueError: if the info lacks an entry.
    """
    found = _spaces(info)
    steps = 0
    while not all(entry.located(found) for entry in given) and steps < _STEPS:
        steps += 1
        for info in step(info):  # noqa: B020 - the next step needs the last one
            found = {**_spaces(info.get(_FINAL_INFO) or {}), **_spaces(info), **found}
    name = type(env).__name__
    placed = placed_entries(given, found, lambda: f"the info of {name} has only {sorted(found)}")
    return InfoLayout(placed), steps > 0


def _spaces(info: Mapping[str, Any]) -> dict[str, Space[Any]]:
    """Returns the spaces of all entries of an info that are tensors."""
    found: dict[str, Space[Any]] = {}
    for name, value in info.items():
        if marks_presence(name, dict(info)) or name in (*FINAL_OBS, _FINAL_INFO):
            continue
        if isinstance(value, Mapping):
            inner = _spaces(value)
            if inner:
                found[name] = spaces.Dict(inner)
        elif isinstance(value, Tensor) and value.ndim:
            kind: np.dtype[Any] = torch.empty(0, dtype=value.dtype).numpy().dtype
            found[name] = box(value.shape[1:], kind)
    return found
