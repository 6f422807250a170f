"""Environments and policies for tests of evaluations."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Normal


class Walk(gymnasium.Env[np.ndarray, np.ndarray]):
    """Ends where chance says; its reward is the action and some noise."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space = spaces.Box(-10.0, 10.0, (1,), np.float32)

    def __init__(self, render_mode: str | None = None, most: int = 30) -> None:
        self.render_mode = render_mode
        self.most = most
        self.resets: list[int | None] = []
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.resets.append(seed)
        self.left = int(self.np_random.integers(1, self.most))
        return self._observe(), {}

    def _observe(self) -> np.ndarray:
        return self.np_random.normal(size=2).astype(np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        self.left -= 1
        reward = float(action[0]) + float(self.np_random.normal())
        return self._observe(), reward, self.left == 0, False, {}

    def render(self) -> np.ndarray:
        return np.full((4, 6, 3), self.left, np.uint8)


class Staged(gymnasium.Env[np.ndarray, np.ndarray]):
    """Episodes of lengths that are given, one after the other; the reward is the length."""

    observation_space = spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space = spaces.Box(-10.0, 10.0, (1,), np.float32)

    def __init__(self, length: int) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.left = self.length
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.left -= 1
        return np.zeros(2, np.float32), 1.0, self.left == 0, False, {}


class Gate(Walk):
    """Says when it is stepped, and waits in its steps until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.stepped, self.go_on = threading.Event(), threading.Event()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.stepped.set()
        assert self.go_on.wait(60)
        return super().step(action)


class DiesOnce(Walk):
    """Kills its process at the fifth step, if a file says so, which it takes away first."""

    def __init__(self, path: str, each: bool = False) -> None:
        super().__init__()
        self.path, self.each = Path(path), each

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.steps == 5 and self.path.exists():
            if not self.each:
                self.path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Fails(Walk):
    """Raises at its third step."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.steps == 2:
            raise KeyError("the pole broke")
        return super().step(action)


def linear(seed: int = 0) -> TensorDictModule:
    """A deterministic policy."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TensorDictModule(nn.Linear(2, 1), in_keys=["observation"], out_keys=["action"])


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(2, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.dropout(self.mean(observation))
        return mean, torch.ones_like(mean)


def stochastic(seed: int = 0) -> ProbabilisticTensorDictSequential:
    """A policy that draws its actions, and has a layer that differs in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = _Head()
    return ProbabilisticTensorDictSequential(
        TensorDictModule(head, in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=Normal,
            default_interaction_type=InteractionType.RANDOM,
        ),
    )
