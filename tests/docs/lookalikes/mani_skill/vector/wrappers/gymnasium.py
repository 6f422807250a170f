"""Gymnasium's vector API."""

from typing import Any

import torch
from gymnasium.vector import VectorEnv


class ManiSkillVectorEnv(VectorEnv[Any, Any, Any]):
    """The adapter, with or without new episodes within a step."""

    def __init__(self, env: Any, auto_reset: bool = True) -> None:
        self._env, self.auto_reset = env, auto_reset
        self.num_envs = self.base_env.num_envs
        self.single_observation_space = self.base_env.single_observation_space
        self.single_action_space = self.base_env.single_action_space

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        found: torch.device = self.base_env.device
        return found

    @property
    def base_env(self) -> Any:
        """The environment below all wrappers."""
        return self._env.unwrapped

    @property
    def unwrapped(self) -> Any:
        """Not a vector environment."""
        return self.base_env

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Begins the episodes of `env_idx`, or all of them."""
        return self._env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        """Steps all environments."""
        obs, reward, terminated, truncated, info = self._env.step(actions)
        done = terminated | truncated
        if self.auto_reset and done.any():
            final = {"final_observation": obs.clone(), "final_info": dict(info)}
            ids = torch.arange(self.num_envs)[done]
            obs, info = self.reset(options={"env_idx": ids})
            info |= {**final, "_final_observation": done, "_final_info": done}
        return obs, reward, terminated, truncated, info

    def close(self, **_: Any) -> None:
        """Closes the environment."""
        self._env.close()
