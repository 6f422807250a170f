"""Entries of the info of vector environments whose data are tensors.

:class:`InfoTensors` is the counterpart of :class:`~trawl.envs.info_wrappers.InfoVector` for
tensors: it adds the entries to the observations, and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from trawl.envs.final_obs import FINAL_OBS, marks_presence
from trawl.envs.info_keys import InfoEntry, box, placed_entries
from trawl.envs.info_wrappers import InfoMerger
from trawl.envs.infos import InfoLayout, InfoLeaf
from trawl.envs.outcomes import reset_results, step_results

# Random steps that are taken to see values, at most.
_STEPS = 1000
_FINAL_INFO = "final_info"


class InfoTensors:
    """Vector environment whose observations have entries of the info.

    Args:
        env: the vector environment.
        layout: layout of the entries.
        device: device of the environment's data.
    """

    def __init__(self, env: Any, layout: InfoLayout, device: torch.device) -> None:
        self._env = env
        self._merge = InfoMerger(env.single_observation_space, layout)
        self.single_observation_space = self._merge.space
        self._blanks = [_blank(leaf, int(env.num_envs), device) for leaf in layout.leaves]
        self._newest: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    def reset(self, *, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """Resets all environments, or those that the options select."""
        if options is not None:
            kwargs["options"] = options
        obs, info = reset_results(self._env.reset(**kwargs), self._env)
        return self.merged(obs, info, self._chosen(options or {}))

    def merged(self, obs: Any, info: Any, mask: Tensor | None = None) -> Any:
        """Returns the results of a reset of all environments, or of those in ``mask``."""
        columns = self._read(info, self._blanks)
        if mask is not None and self._newest:
            columns = [_where(mask, *pair) for pair in zip(columns, self._newest, strict=True)]
        self._newest = columns
        return self._merge(obs, self._nest(columns)), info

    def step(self, actions: Any) -> Any:
        """Steps all environments."""
        found = step_results(self._env.step(actions), self._env)
        obs, reward, terminated, truncated, info = found
        columns = self._newest = self._read(info, self._blanks)
        name = next((one for one in FINAL_OBS if info.get(one) is not None), None)
        if name is not None:
            # The last step's entries are in ``final_info``, if there is one.
            final = info.get(_FINAL_INFO)
            last = columns if final is None else self._read(final, self._blanks)
            marked = info.get(f"_{_FINAL_INFO}")
            if final is not None and marked is not None:
                last = [_where(marked, *pair) for pair in zip(last, columns, strict=True)]
            info = {**info, name: self._merge(info[name], self._nest(last))}
        return self._merge(obs, self._nest(columns)), reward, terminated, truncated, info

    def _nest(self, columns: Sequence[Tensor]) -> dict[str, Any]:
        return self._merge.layout.nest(columns)

    def _read(self, info: Any, blanks: Sequence[Tensor]) -> list[Tensor]:
        leaves = self._merge.layout.leaves
        return [_value(leaf, info, blank) for leaf, blank in zip(leaves, blanks, strict=True)]

    def _chosen(self, options: Mapping[str, Any]) -> Tensor | None:
        """Returns the mask of the environments that a reset's options select; None for all."""
        if options.get("reset_mask") is not None:
            mask: Tensor = options["reset_mask"].clone()
            return mask
        if options.get("env_idx") is None:
            return None
        ids = options["env_idx"]
        mask = torch.zeros(int(self._env.num_envs), dtype=torch.bool, device=ids.device)
        return mask.index_fill_(0, ids, True)


def _blank(leaf: InfoLeaf, num_envs: int, device: torch.device) -> Tensor:
    if leaf.dtype is None:
        raise ValueError(
            f"info_keys says that {leaf.path} has no fixed layout, but the info of an environment "
            "whose data are tensors must have tensors: state a space, or leave the name out"
        )
    return torch.as_tensor(leaf.column(num_envs), device=device)


def _value(leaf: InfoLeaf, info: Any, blank: Tensor) -> Tensor:
    """Returns the values of a leaf; those of ``blank`` where the info has none."""
    value, marks = info, []
    for name in leaf.path:
        if not isinstance(value, Mapping) or value.get(name) is None:
            return blank
        if value.get(f"_{name}") is not None:
            marks.append(value[f"_{name}"])
        value = value[name]
    shown = _checked(leaf, value, blank)
    for mark in marks:
        shown = _where(mark, shown, blank)
    return shown


def _checked(leaf: InfoLeaf, value: Any, blank: Tensor) -> Tensor:
    name = leaf.name
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch tensor, but it is {type(value).__name__}")
    if value.device != blank.device:
        raise ValueError(
            f"{name} is on {value.device}, but the environment's data are on {blank.device}"
        )
    if value.shape == blank.shape[:1] and leaf.shape == (1,):
        value = value.unsqueeze(-1)
    if value.shape != blank.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but it had, or info_keys says, "
            f"{tuple(blank.shape)}: one row for each environment"
        )
    if not torch.can_cast(value.dtype, blank.dtype):
        raise TypeError(f"{name} is {value.dtype}, but it was, or info_keys says, {blank.dtype}")
    shown: Tensor = value.to(blank.dtype)
    return shown


def _where(mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (one.ndim - 1)), one, other)


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
