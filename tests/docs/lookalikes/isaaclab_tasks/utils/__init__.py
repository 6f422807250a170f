"""Configurations of tasks."""

from typing import Any

from isaaclab.envs import config


def parse_env_cfg(task_name: str, device: str = "cuda:0", num_envs: int | None = None) -> Any:
    """Returns the configuration of a task."""
    return config(device, num_envs or 4)
