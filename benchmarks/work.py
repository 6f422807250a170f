"""The work to be done: environments and policies that every contender gets alike."""

from __future__ import annotations

import time
import warnings
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from numpy.typing import NDArray
from tensordict.nn import (
    NormalParamExtractor,
    TensorDictModule,
)
from torch import Tensor, nn

POOL_SIZE = 64


def pendulum() -> gymnasium.Env[Any, Any]:
    """Gymnasium's Pendulum, without the checker that only warns about faulty environments."""
    return gymnasium.make("Pendulum-v1", disable_env_checker=True)


def slow_pendulum() -> gymnasium.Env[Any, Any]:
    """A Pendulum that takes 50 ms to step."""
    return Slow(pendulum())


def waiting_pendulum() -> gymnasium.Env[Any, Any]:
    """A Pendulum that waits for 1 ms in each step."""
    env = Slow(pendulum())
    env.seconds = 0.001
    return env


def cartpole() -> gymnasium.Env[Any, Any]:
    """Gymnasium's CartPole, without the checker."""
    return gymnasium.make("CartPole-v1", disable_env_checker=True)


def cartpole_pool(ready: int = POOL_SIZE) -> Any:
    """64 CartPoles in EnvPool, on one thread like everything else here (also its fastest).

    EnvPool returns the results of the first `ready` ones that have stepped.
    """
    import envpool

    # EnvPool makes its spaces anew, and Gymnasium warns of their precision, at every look at them.
    warnings.filterwarnings("ignore", ".*precision lowered by casting", UserWarning)
    return envpool.make_gymnasium(
        "CartPole-v1", num_envs=POOL_SIZE, batch_size=ready, num_threads=1
    )


class ImageEnv(gymnasium.Env[NDArray[np.uint8], NDArray[np.float32]]):
    """Atari-shaped frames, freshly made each step, for the price of one copy."""

    observation_space = Box(0, 255, (84, 84, 4), np.uint8)
    action_space = Box(-1.0, 1.0, (1,), np.float32)
    length = 1000

    def __init__(self) -> None:
        self._frame = np.random.default_rng(0).integers(0, 256, (84, 84, 4), np.uint8)
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        self._step = 0
        return self._frame.copy(), {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        self._step += 1
        frame = self._frame.copy()
        frame[0, 0, 0] = self._step & 255  # so that no two neighbours are equal
        return frame, 1.0, False, self._step >= self.length, {}


class StampedImageEnv(ImageEnv):
    """Frames whose first bytes tell when they were made."""

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        result[0].reshape(-1)[:8].view(np.float64)[0] = time.monotonic()
        return result


def stamped(frames: Tensor) -> float:
    """When the last of some frames of `StampedImageEnv` was made, by `time.monotonic`."""
    stamps = frames.flatten(-3)[..., :8].contiguous().view(torch.float64)
    return float(stamps.max())


class BytesEnv(gymnasium.Env[NDArray[np.uint8], NDArray[np.float32]]):
    """Observations of so many bytes, each a fresh copy."""

    action_space = Box(-1.0, 1.0, (1,), np.float32)
    length = 1000

    def __init__(self, size: int) -> None:
        self.observation_space = Box(0, 255, (size,), np.uint8)
        self._observation = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        self._step = 0
        return self._observation.copy(), {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._observation.copy(), 1.0, False, self._step >= self.length, {}


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Each step waits for something else than the processor."""

    seconds = 0.05

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return super().step(action)


class WaitingPendulum(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A Pendulum whose steps wait, for 2 ms on average.

    Args:
        seed: seed of the times, which are log-normal.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(pendulum())
        self._random = np.random.default_rng(seed)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        time.sleep(waiting_seconds(self._random, 1)[0])
        return super().step(action)


def waiting_seconds(random: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Log-normal waiting times with a mean of 2 ms."""
    mean, spread = 0.002, 0.5
    return random.lognormal(np.log(mean) - spread**2 / 2, spread, count)


POLICY_SECONDS = 0.003


class SlowPolicy(nn.Module):
    """A policy that takes 3 ms for all environments, and less for some of them.

    Args:
        count: number of all environments.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.net, self.count = mlp(3, 1), count

    def forward(self, observation: Tensor) -> Tensor:
        time.sleep(POLICY_SECONDS * observation.shape[:-1].numel() / self.count)
        action: Tensor = self.net(observation)
        return action


class ConstantEnv(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """Returns the same array for ever: the cheapest environment there can be."""

    observation_space = Box(-1.0, 1.0, (4,), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)
    length = 1000

    def __init__(self) -> None:
        self._observation = np.zeros(4, np.float32)
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        self._step = 0
        return self._observation, {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._observation, 1.0, False, self._step >= self.length, {}


def mlp(inputs: int, outputs: int, seed: int = 0) -> nn.Sequential:
    """Two hidden layers of 64 tanh units, the usual size for control from states."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


class Argmax(nn.Module):
    """The action with the highest score."""

    def __init__(self, scores: nn.Module) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, observation: Tensor) -> Tensor:
        best: Tensor = self.scores(observation).argmax(-1)
        return best


class Constant(nn.Module):
    """The same action whatever is seen, so that only the collector's own work remains."""

    def __init__(self) -> None:
        super().__init__()
        self.action = torch.zeros(1)

    def forward(self, observation: Tensor) -> Tensor:
        return self.action


def gaussian_head(seed: int = 0) -> nn.Sequential:
    """An MLP that returns the mean and the scale of a Gaussian over Pendulum's torque."""
    return nn.Sequential(mlp(3, 2, seed), NormalParamExtractor())


def acting(module: nn.Module) -> TensorDictModule:
    """`module` as a policy that reads "observation" and writes "action"."""
    return TensorDictModule(module, in_keys=["observation"], out_keys=["action"])
