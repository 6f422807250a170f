"""Wrappers that add entries of the info to the observations of an environment.

As observations, the entries reach batches, policies, workers and states like all others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import VectorWrapper
from gymnasium.vector.utils import batch_space
from typing_extensions import override

from trawl.envs.final_obs import final_sample
from trawl.envs.infos import InfoLayout, InfoLeaf
from trawl.envs.masks import MaskKeeper
from trawl.envs.outcomes import checked_info, reset_results, step_results
from trawl.envs.spaces import SpaceCodec
from trawl.memory import Array, Mask


class InfoMerger:
    """Adds entries of the info to observations.

    Args:
        observed: the observation space of one environment.
        layout: layout of the entries.

    Attributes:
        space: the observation space with the entries.
        layout: layout of the entries.

    Raises:
        ValueError: if an observation has the name of an entry.
    """

    def __init__(self, observed: Space[Any], layout: InfoLayout) -> None:
        self.layout = layout
        # The copy has a random generator of its own.
        observed = copy.deepcopy(observed)
        self._nested = isinstance(observed, spaces.Dict)
        parts = dict(observed.spaces) if isinstance(observed, spaces.Dict) else {}
        if not self._nested:
            parts["observation"] = observed
        for name in layout.space.spaces:
            if name in parts:
                raise ValueError(
                    f"info_keys adds an entry {name!r} to the observation, which already has one: "
                    "pass another key, as in InfoKey(..., key=...), or rename the observation "
                    "with a wrapper"
                )
        self.space = spaces.Dict({**parts, **layout.space.spaces})

    def __call__(self, obs: Any, infos: dict[str, Any]) -> dict[str, Any]:
        """Returns an observation with entries of the info."""
        return {**obs, **infos} if self._nested else {"observation": obs, **infos}

    def observed(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the path of a merged observation in the observation without the info."""
        return path if self._nested else path[1:]


class InfoSingle(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that adds entries of the info to the observations of a single environment."""

    def __init__(self, env: gymnasium.Env[Any, Any], layout: InfoLayout) -> None:
        super().__init__(env)
        self._merge = InfoMerger(env.observation_space, layout)
        self.observation_space = self._merge.space

    def direct_leaves(self, codec: SpaceCodec) -> dict[int, InfoLeaf] | None:
        """Returns the leaves of the info among those of the merged observations, by their index.

        If no leaf has to be encoded, a caller may step the wrapped environment, read these leaves
        from the info itself, and the others from the observation. In other cases, returns None.

        Args:
            codec: codec of the merged observations.
        """
        infos = {leaf.key: leaf for leaf in self._merge.layout.leaves}
        return (
            {
                index: infos[leaf.path]
                for index, leaf in enumerate(codec.leaves)
                if leaf.path in infos
            }
            if codec.verbatim
            else None
        )

    def observed(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the path of a merged observation in the observation without the info."""
        return self._merge.observed(path)

    @override
    def reset(self, **kwargs: Any) -> Any:
        obs, info = reset_results(self.env.reset(**kwargs), self.env)
        merge, info = self._merge, checked_info(info, "reset", self.env)
        return merge(obs, merge.layout.sample(info)), info

    @override
    def step(self, action: Any) -> Any:
        found = step_results(self.env.step(action), self.env)
        obs, reward, terminated, truncated, info = found
        merge, info = self._merge, checked_info(info, "step", self.env)
        return merge(obs, merge.layout.sample(info)), reward, terminated, truncated, info


def keep_masks(env: Any, mask: Array) -> tuple[Any, MaskKeeper]:
    """Wraps an environment so that its action masks are kept; an :class:`InfoSingle` stays outside.

    Args:
        env: the environment.
        mask: the newest mask.

    Returns:
        The environment, and the wrapper that keeps the masks.
    """
    if isinstance(env, InfoSingle):
        env.env = keeper = MaskKeeper(env.env, mask)
        return env, keeper
    keeper = MaskKeeper(env, mask)
    return keeper, keeper


class InfoVector(VectorWrapper[Any, Any, Any, Any, Any]):
    """Wrapper that adds entries of the info to the observations of a vector environment.

    Args:
        env: the vector environment.
        layout: layout of the entries.
        same_step: True if the step that ends an episode also begins the next one. The entries of
            its last step are in ``info["final_info"]``.
        statistics: names of entries that a wrapper around the vector environment adds at the end
            of an episode, outside ``info["final_info"]``.
    """

    def __init__(
        self, env: Any, layout: InfoLayout, same_step: bool, statistics: tuple[str, ...]
    ) -> None:
        super().__init__(env)
        self._merge = InfoMerger(env.single_observation_space, layout)
        self._same_step = same_step
        self._statistics = statistics
        self.single_observation_space = self._merge.space
        self.observation_space = batch_space(self._merge.space, self.num_envs)
        self._newest: list[Any] = []

    @override
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        # The environment may remove the mask from the options.
        mask: Mask | None = (options or {}).get("reset_mask")
        obs, info = reset_results(self.env.reset(seed=seed, options=options), self.env)
        layout = self._merge.layout
        columns = layout.columns(self.num_envs)
        if mask is not None and self._newest:
            columns = [column.copy() for column in self._newest]
            layout.clear(columns, mask)
        layout.fill(columns, info, mask)
        self._newest = columns
        return self._merge(obs, layout.nest(columns)), info

    @override
    def step(self, actions: Any) -> Any:
        found = step_results(self.env.step(actions), self.env)
        obs, reward, terminated, truncated, info = found
        layout = self._merge.layout
        columns = last = layout.columns(self.num_envs)
        layout.fill(columns, info)
        ended = np.logical_or(terminated, truncated)
        if ended.any():
            if self._same_step:
                last = self._last(columns, info, ended)
            info = self._with_final(info, last, ended)
        self._newest = columns
        return self._merge(obs, layout.nest(columns)), reward, terminated, truncated, info

    def _last(self, columns: list[Any], info: Any, ended: Mask) -> list[Any]:
        """Returns the entries of the steps that ended episodes; clears them in ``columns``."""
        layout, last = self._merge.layout, [column.copy() for column in columns]
        if isinstance(info, Mapping):
            final = info.get("final_info")
            marked = ended & info.get("_final_info", ended)
        else:
            final = [one.get("final_info", {}) for one in info]
            marked = np.array(["final_info" in one for one in info]) & ended
        if final is not None and marked.any():
            # The other entries of the info belong to the reset.
            layout.clear(last, marked)
            layout.fill(last, final, marked)
        if self._statistics:
            layout.fill(last, info, ended, self._statistics)
            layout.clear(columns, ended, self._statistics)
        return last

    def _with_final(self, info: Any, last: list[Any], ended: Mask) -> Any:
        """Adds the entries to the last observations in the info."""
        found = {}
        for row in map(int, np.flatnonzero(ended)):
            sample = final_sample(info, row)
            if sample is not None:
                infos = self._merge.layout.nest([column[row] for column in last])
                found[row] = self._merge(sample, infos)
        if not found:
            return info
        if not isinstance(info, Mapping):
            rows = enumerate(info)
            return [{**one, "final_obs": found[i]} if i in found else one for i, one in rows]
        final, present = np.full(self.num_envs, None, object), np.zeros(self.num_envs, np.bool_)
        for row, sample in found.items():
            final[row], present[row] = sample, True
        return {**info, "final_obs": final, "_final_obs": present}


class InfoEnvPool:
    """EnvPool environment whose observations have entries of the info.

    Args:
        env: the environment.
        layout: layout of the entries.
    """

    def __init__(self, env: Any, layout: InfoLayout, observed: Space[Any]) -> None:
        self._pool = env
        self._merge = InfoMerger(observed, layout)
        self.single_observation_space = self._merge.space

    def __getattr__(self, name: str) -> Any:
        if name in ("_pool", "_merge") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._pool, name)

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Resets some or all of the sub-environments."""
        obs, info = self._pool.reset(*args, **kwargs)
        return self._merged(obs, info), info

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps all sub-environments."""
        obs, *outcome, info = self._pool.step(*args, **kwargs)
        return (self._merged(obs, info), *outcome, info)

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        """Waits for the results of sub-environments."""
        obs, *outcome, info = self._pool.recv(*args, **kwargs)
        return (self._merged(obs, info), *outcome, info)

    def _merged(self, obs: Any, info: Any) -> dict[str, Any]:
        layout = self._merge.layout
        columns = layout.columns(len(info["env_id"]))
        layout.fill(columns, info)
        return self._merge(obs, layout.nest(columns))
