"""Environments of an evaluation: each episode has its own seed, and statistics are frozen."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Env
from numpy.typing import NDArray

from trawl.collectors.local.first_ready import pool_of
from trawl.envs.base import TensorDictEnv
from trawl.envs.batches.foreign import is_torchrl
from trawl.envs.dm import DMEnv
from trawl.envs.generators import draws_privately
from trawl.envs.gym import GymEnv
from trawl.envs.layers import WRAPPERS, layers_of
from trawl.envs.outcomes import reward_shape_of
from trawl.envs.seeding import derive

Video = NDArray[np.uint8]


def episode_seed(seed: int, episode: int) -> int:
    """Returns the seed of the reset that begins an episode of an evaluation.

    Args:
        seed: seed of the evaluation.
        episode: number of the episode, from 0.
    """
    return derive(seed, "episode", episode)


class _GlobalTorch:
    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)


_TORCH = _GlobalTorch()


class SeededEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Begins each episode with a seed that depends on the episode's number, not the environment.

    Environment ``index`` of ``stride`` environments runs the episodes ``index``,
    ``index + stride``, and so on. After its last episode, the environment is idle: its simulator
    is not stepped until the next evaluation.

    Args:
        env: the environment.
        index: number of this environment among all environments of the evaluation.
        stride: number of environments of the evaluation.
        episodes: number of episodes in an evaluation, over all environments.
        record: True to render the first episode, if the environment was made to render arrays.
        limit: number of steps after which an episode is truncated here, or None.

    Attributes:
        frames: renderings of the first episode, a ``(height, width, 3)`` array for each step.
    """

    def __init__(
        self,
        env: Env[Any, Any],
        index: int,
        stride: int,
        episodes: int,
        record: bool,
        limit: int | None = None,
    ) -> None:
        super().__init__(env)
        self.limit, self._steps = limit, 0
        self.index, self.stride, self.episodes = index, stride, episodes
        self.record = record and index == 0 and renders(env)
        self.frames: list[Any] = []
        self._seed, self._seeds_globals = 0, False
        self._episode: int | None = None  # None before the first evaluation
        shape = reward_shape_of(env)
        self._nothing: Any = np.zeros(shape, np.float32) if shape else 0.0
        self._last: Any = None  # observation and info of the newest reset

    @property
    def idle(self) -> bool:
        """True if all episodes of this environment are over."""
        return self._episode is not None and self._episode >= self.episodes

    @property
    def recording(self) -> bool:
        """True if the episode under way is rendered."""
        return self.record and self._episode == 0

    def begin(self, seed: int, seeds_globals: bool = False) -> None:
        """Begins an evaluation: the next reset begins the first episode.

        Args:
            seed: seed of the evaluation.
            seeds_globals: whether a reset seeds the global generators of numpy and random, too.
        """
        self._seed, self._episode = seed, self.index - self.stride
        self._seeds_globals = seeds_globals
        self.frames = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begins the next episode of this environment."""
        self._steps = 0
        if self._episode is None:
            return self.env.reset(seed=seed, options=options)
        if not self.idle:
            self._episode += self.stride
        if self.idle:
            if self._last is None:
                self._last = self.env.reset(seed=seed, options=options)
            return self._last
        seed = episode_seed(self._seed, self._episode)
        if self._seeds_globals:
            seed_globals(seed)
        self._last = self.env.reset(seed=seed, options=options)
        if self.recording:
            self.frames.append(self.env.render())
        return self._last

    def step(self, action: Any) -> Any:
        """Takes a step, unless the environment is idle."""
        if self.idle:
            obs, info = self._last
            return obs, self._nothing, False, False, info
        result = self.env.step(action)
        if self.recording:
            self.frames.append(self.env.render())
        self._steps += 1
        if self._steps == self.limit:
            obs, reward, terminated, _, info = result
            return obs, reward, terminated, True, info
        return result


def seed_globals(seed: int) -> None:
    """Seeds the generators of numpy, random and torch; of torch, those of this thread if it has."""
    (draws_privately.get() or _TORCH).seed(derive(seed, "torch"))
    np.random.seed(derive(seed, "numpy") % 2**32)
    random.seed(derive(seed, "python"))


def renders(env: Any) -> bool:
    """Returns True if an environment was made to render arrays."""
    inner = getattr(env, "unwrapped", env)
    # Every environment of dm_control can render, but this is slow and needs OpenGL.
    asked = not isinstance(inner, DMEnv) or bool(inner.render_options)
    return asked and getattr(env, "render_mode", None) == "rgb_array"


def is_simulators(env: Any) -> bool:
    """Returns True for a single Gymnasium environment, or a batch of them."""
    parts = env.parts if isinstance(env, TensorDictEnv) else [env]
    return all(isinstance(part, GymEnv) and part.vector is None for part in parts)


def seeded(
    env: Any, worker: int, workers: int, episodes: int, record: bool, limit: int | None = None
) -> bool:
    """Seeds each episode of an environment by the episode's number, if the environment allows it.

    Single Gymnasium environments allow it, alone or in a batch. Vector environments begin episodes
    by themselves, and TorchRL's environments are seeded in their own ways.

    Args:
        env: the environment of a collector.
        worker: number of the worker that has the environment.
        workers: number of workers; all have the same number of environments.
        episodes: number of episodes in an evaluation.
        record: whether the first episode is rendered.
        limit: number of steps after which an episode is truncated, if the collector sets no limit.

    Returns:
        True if the episodes are seeded by their numbers.

    Raises:
        ValueError: if the environment can't be evaluated.
    """
    check_steps(env)
    if not is_simulators(env):
        return False
    parts = env.parts
    for index, part in enumerate(parts, worker * len(parts)):
        if not isinstance(part.env, SeededEpisodes):
            stride = workers * len(parts)
            part.env = SeededEpisodes(part.env, index, stride, episodes, record, limit)
    return True


def check_steps(env: Any) -> None:
    """Rejects an environment that doesn't step all of its environments at once.

    Raises:
        ValueError: if the environment is a pool.
    """
    pool = pool_of(env)
    if pool is not None:
        raise ValueError(f"the environment can't be evaluated: {pool.why_alone}")


def simulators(env: Any) -> list[SeededEpisodes]:
    """Returns the environments whose episodes are seeded by their numbers."""
    parts = env.parts if isinstance(env, TensorDictEnv) else []
    wrapped = [getattr(part, "env", None) for part in parts]
    return [each for each in wrapped if isinstance(each, SeededEpisodes)]


def freeze(env: Any, before_data: bool = False) -> list[Callable[[], Any]]:
    """Stops Gymnasium's wrappers and TorchRL's transforms from updating their statistics.

    If an evaluation changed the statistics that it normalises with, its result would depend on the
    number of evaluations before it.

    Args:
        env: the environment.
        before_data: whether to freeze TorchRL's transforms that have seen no data yet. They then
            normalise to NaN, unlike Gymnasium's wrappers.

    Returns:
        Functions that let those go on that were not frozen before.
    """
    undo: list[Callable[[], Any]] = []
    if is_torchrl(env) and env.is_closed and hasattr(env, "start"):
        env.start()  # a SerialEnv makes its environments here
    for layer in layers_of(env):
        if isinstance(layer, WRAPPERS):
            if getattr(layer, "update_running_mean", False) is True:
                setattr(layer, "update_running_mean", False)  # noqa: B010
                undo.append(partial(setattr, layer, "update_running_mean", True))
        elif (
            hasattr(type(layer), "frozen_copy")
            and not layer.frozen
            and (before_data or _has_data(layer))
        ):
            layer.freeze()
            undo.append(layer.unfreeze)
    return undo


def _has_data(transform: Any) -> bool:
    """Returns True if a transform of TorchRL that normalises has seen data."""
    state = next((v for k, v in transform.state_dict().items() if k.endswith("extra_state")), None)
    counts = [value for key, value in (state or {}).items() if "count" in key]
    return any(bool(count.any()) for count in counts)


def video_of(env: Any) -> Video | None:
    """Returns a video of the first episode, or None if it was not rendered here.

    The video is a uint8 array of shape ``(steps + 1, height, width, 3)``.
    """
    for simulator in simulators(env):
        if simulator.frames:
            return np.stack([np.asarray(frame, np.uint8) for frame in simulator.frames])
    return None


def dump_videos(env: Any, step: int) -> None:
    """Writes the videos that TorchRL's video recorders have gathered.

    Args:
        env: the environment, with the recorders among its transforms.
        step: number of the step at which the videos are logged.
    """
    transform = getattr(env, "transform", None)
    dump = getattr(transform, "dump", None)
    if callable(dump):
        dump(step=step)
