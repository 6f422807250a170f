"""An environment whose steps begin new episodes, and return their first observations."""

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import torch
from gymnasium.spaces import Box, Dict
from torch import Tensor

LENGTH = 5


class ObservationManager:
    """Computes observations of the state that there is when it is called."""

    def __init__(self, env: "ManagerBasedRLEnv") -> None:
        self.env = env

    def compute(self, update_history: bool = False) -> dict[str, Tensor]:
        """Returns the observations, by group."""
        age = self.env.episode_length_buf.float().unsqueeze(-1)
        return {"policy": torch.cat([age, self.env.position], -1)}


class ManagerBasedRLEnv(gym.Env[Any, Any]):
    """Moves points; an episode ends outside of the interval, or after some steps."""

    metadata = {"render_modes": [None, "human", "rgb_array"]}  # noqa: RUF012 - as the original

    def __init__(self, cfg: Any, render_mode: str | None = None) -> None:
        self.cfg, self.device, self.num_envs = cfg, cfg.sim.device, cfg.scene.num_envs
        self.single_observation_space = Dict(policy=Box(-float("inf"), float("inf"), (2,)))
        self.single_action_space = Box(-float("inf"), float("inf"), (1,))
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)
        self.position = torch.zeros(self.num_envs, 1, device=self.device)
        self.reward_buf = torch.zeros(self.num_envs, device=self.device)
        self.observation_manager = ObservationManager(self)
        self.extras: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begins all episodes."""
        self._reset_idx(torch.arange(self.num_envs, device=self.device))
        self.obs_buf = self.observation_manager.compute(update_history=True)
        return self.obs_buf, self.extras

    def _reset_idx(self, env_ids: Tensor) -> None:
        self.extras["log"] = {}
        self.position[env_ids] = 0
        self.episode_length_buf[env_ids] = 0

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Moves, and begins new episodes before it computes observations."""
        self.position += action
        self.episode_length_buf += 1
        terminated = self.position[:, 0].abs() > 2
        time_outs = self.episode_length_buf >= LENGTH
        self.reward_buf[:] = self.position[:, 0]
        ids = (terminated | time_outs).nonzero().squeeze(-1)
        if len(ids) > 0:
            self._reset_idx(ids)
        self.obs_buf = self.observation_manager.compute(update_history=True)
        return self.obs_buf, self.reward_buf, terminated, time_outs, self.extras

    def close(self) -> None:
        """Nothing is open."""


def config(device: str, num_envs: int) -> Any:
    """The part of a configuration that this environment reads."""
    return SimpleNamespace(
        sim=SimpleNamespace(device=device), scene=SimpleNamespace(num_envs=num_envs)
    )
