"""Trawl and its peers, each as a source of batches. A peer is imported only when it is built."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
from torch import nn

from harness import Source


def trawl(env: Any, policy: Any, frames: int) -> Source:
    """Trawl's collector with its defaults."""
    from trawl.collectors import Collector

    collector = Collector(env, policy, frames_per_batch=frames, total_frames=-1)
    try:
        for batch in collector:
            yield batch.numel(), batch
    finally:
        collector.shutdown()


def trawl_ready(env: Any, policy: Any, frames: int) -> Source:
    """Trawl's collector of whoever is ready."""
    from trawl.collectors import AsyncBatchedCollector

    collector = AsyncBatchedCollector(env, policy=policy, frames_per_batch=frames)
    try:
        for batch in collector:
            yield batch.numel(), batch
    finally:
        collector.shutdown()


def trawl_indexed(make: Callable[[], Any]) -> Any:
    """An environment whose discrete actions are indices."""
    from trawl.envs import GymEnv

    return GymEnv(make(), categorical_action_encoding=True)


def torchrl(env: Any, policy: Any, frames: int, **options: Any) -> Source:
    """TorchRL's collector; `trust_policy` spares it a wrapper around the policy."""
    from torchrl.collectors import Collector

    collector = Collector(
        env,
        policy,
        frames_per_batch=frames,
        total_frames=-1,
        trust_policy=True,
        auto_register_policy_transforms=False,
        **options,
    )
    same_work = options.get("track_traj_ids", True)
    try:
        for batch in collector:
            yield batch.numel(), batch if same_work else None
    finally:
        collector.shutdown()


def torchrl_single(make: Callable[[], Any]) -> Any:
    """A Gymnasium environment as TorchRL wraps it."""
    from torchrl.envs import GymWrapper

    return GymWrapper(make())


def torchrl_indexed(make: Callable[[], Any]) -> Any:
    """A Gymnasium environment as TorchRL wraps it, with actions that are indices."""
    from torchrl.envs import GymWrapper

    return GymWrapper(make(), categorical_action_encoding=True)


def torchrl_serial(
    make: Callable[[], Any], count: int, use_buffers: bool, wrap: Callable[[], Any] | None = None
) -> Any:
    """TorchRL's batch of environments in one process; without its own buffers it is faster."""
    from torchrl.envs import GymWrapper, SerialEnv

    return SerialEnv(count, wrap or (lambda: GymWrapper(make())), use_buffers=use_buffers)


def torchrl_vector(make: Callable[[], Any], count: int) -> Any:
    """Gymnasium's vector environment as TorchRL wraps it."""
    import logging

    from torchrl.envs import GymWrapper

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    return GymWrapper(sync_vector(make, count, copy=True))


def sync_vector(make: Callable[[], Any], count: int, copy: bool) -> gymnasium.vector.SyncVectorEnv:
    """Gymnasium's vector environment, every step of which is a frame.

    Without `copy` its arrays are overwritten by the next step, for users who store them at once.
    """
    return gymnasium.vector.SyncVectorEnv(
        [make] * count, copy=copy, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )


def stable_baselines3(make: Callable[[], Any], count: int, steps: int) -> Source:
    """The rollouts of TD3: a deterministic MLP whose transitions go to a replay buffer.

    TD3 and not PPO, as PPO's rollouts evaluate a critic and a distribution as well.
    """
    from stable_baselines3 import TD3
    from stable_baselines3.common.vec_env import DummyVecEnv

    frames = count * steps
    model: Any = TD3(
        "MlpPolicy",
        DummyVecEnv([make] * count),
        policy_kwargs={"net_arch": [64, 64], "activation_fn": nn.Tanh},
        train_freq=(steps, "step"),
        learning_starts=0,
        buffer_size=frames,
        device="cpu",
    )
    _, callback = model._setup_learn(total_timesteps=2**60)
    while True:
        model.collect_rollouts(
            model.env, callback, model.train_freq, model.replay_buffer, learning_starts=0
        )
        yield frames, None


def tianshou(make: Callable[[], Any], net: nn.Module, count: int, steps: int) -> Source:
    """Tianshou's collector into its replay buffer, without its search for NaNs."""
    import torch
    from tianshou.algorithm.algorithm_base import Policy
    from tianshou.data import Batch, Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv

    class Deterministic(Policy):
        def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
            with torch.no_grad():
                return Batch(act=net(torch.from_numpy(batch.obs)))

    env = DummyVectorEnv([make] * count)
    policy = Deterministic(action_space=env.action_space[0], action_bound_method=None)
    buffer = VectorReplayBuffer(count * 1000, count)
    collector: Any = Collector(policy, env, buffer, raise_on_nan_in_buffer=False)
    collector.reset()
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            collector.collect(n_step=count * steps)
        yield count * steps, None
