"""Environments that `gymnasium.make` knows after the import of this module."""

from typing import Any

import gymnasium as gym
import torch
from gymnasium.spaces import Box
from torch import Tensor

LENGTH = 5


class PickCube(gym.Env[Any, Any]):
    """Batch of environments; none of them begins a new episode by itself."""

    def __init__(self, num_envs: int = 1, obs_mode: str = "state") -> None:
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.single_observation_space = Box(-float("inf"), float("inf"), (2,))
        self.single_action_space = Box(-1, 1, (1,))
        self.observation_space = Box(-float("inf"), float("inf"), (num_envs, 2))
        self.action_space = Box(-1, 1, (num_envs, 1))
        self.elapsed_steps = torch.zeros(num_envs, dtype=torch.int32)
        self.position = torch.zeros(num_envs, 1)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Tensor, dict[str, Any]]:
        """Begins the episodes of `env_idx`, or all of them."""
        ids = (options or {}).get("env_idx", torch.arange(self.num_envs))
        self.elapsed_steps[ids] = 0
        self.position[ids] = 0
        return self._seen(), {"elapsed_steps": self.elapsed_steps.clone()}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Moves all environments."""
        self.position += action
        self.elapsed_steps += 1
        success = self.position[:, 0] > 1
        info = {"elapsed_steps": self.elapsed_steps.clone(), "success": success}
        return self._seen(), success.float(), success, self.elapsed_steps >= LENGTH, info

    def _seen(self) -> Tensor:
        return torch.cat([self.elapsed_steps.float().unsqueeze(-1), self.position], -1)


if "PickCube-v1" not in gym.registry:
    gym.register("PickCube-v1", PickCube, disable_env_checker=True)
