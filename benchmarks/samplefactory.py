"""Sample Factory's sampler in its serial mode: all of it in this process, without a learner.

Its batches are its own dictionaries of tensors, whose memory is reused. They lack the true last
observations of episodes, because its environments reset themselves, and ids. A policy has to
return values as well, which are zeros here.

Sample Factory 2.1 was made for Gymnasium before 1.0 and numpy before 2.0. `adapt` replaces two
places that fail with the present ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from harness import Source


class Agents(gymnasium.Env[Any, Any]):
    """A vector environment in the form of one environment with several agents."""

    is_multiagent = True

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self.num_agents = count
        self._vector = gymnasium.vector.SyncVectorEnv(
            [make] * count, copy=False, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
        )
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._vector.reset(seed=seed)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = self._vector.step(action)
        return observation, reward.astype(np.float32), terminated, truncated, {}


def sample_factory(
    make: Callable[[], Any], net: nn.Module, count: int, steps: int, draws: bool
) -> Source:
    """Sample Factory's sampler of `count` environments.

    Several environments are sampled in batches, one is not: for each that is faster.

    Args:
        make: Makes an environment.
        net: Returns actions, or the parameters of a distribution.
        count: Number of environments.
        steps: Steps of a batch.
        draws: Whether the actions are drawn, with Sample Factory's distribution.
    """
    from sample_factory.algo.sampling.simplified_sampling_api import SamplingLoop
    from sample_factory.algo.utils.action_distributions import (
        get_action_distribution,
        sample_actions_log_probs,
    )
    from sample_factory.algo.utils.env_info import extract_env_info
    from sample_factory.algo.utils.make_env import make_env_func_batched
    from sample_factory.algo.utils.model_sharing import ParameterServer
    from sample_factory.algo.utils.shared_buffers import BufferMgr
    from sample_factory.algo.utils.tensor_dict import TensorDict
    from sample_factory.envs.env_utils import register_env
    from sample_factory.model.actor_critic import ActorCritic
    from sample_factory.utils.utils import log

    log.setLevel(logging.ERROR)
    adapt()

    class Actor(ActorCritic):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.net = net

        def device_for_input_tensor(self, name: str) -> torch.device:
            return torch.device("cpu")

        def type_for_input_tensor(self, name: str) -> torch.dtype:
            return torch.float32

        def forward(self, observations: Any, states: Tensor, values_only: bool = False) -> Any:
            made = self.net(observations["obs"])
            zeros = torch.zeros(count)
            if draws:
                logits = made
                drawn = get_action_distribution(self.action_space, logits)
                actions, log_probs = sample_actions_log_probs(drawn)
            else:
                actions, logits, log_probs = made, torch.zeros(count, 2), zeros
            return TensorDict(
                actions=actions,
                action_logits=logits,
                log_prob_actions=log_probs,
                values=zeros,
                new_rnn_states=states,
            )

    name, batched = f"{count}-{make.__name__}", count > 1
    register_env(name, lambda *_, **__: Agents(make, count) if batched else make())
    config = configuration(name, count * steps, steps, batched)
    info = extract_env_info(make_env_func_batched(config, None), config)
    buffers = BufferMgr(config, info)
    server = ParameterServer(0, buffers.policy_versions, serial_mode=True)
    server.init(Actor(info.obs_space, info.action_space, config), 0, torch.device("cpu"))
    sampler = SamplingLoop(config, info)
    sampler.init(buffers, {0: server})
    ready: list[Any] = []
    sampler.set_new_trajectory_callback(lambda *batch: ready.append(batch))
    # What `SamplingLoop.run` does, one batch at a time.
    loop = sampler.event_loop
    loop.default_timer.start()
    loop.start.emit()
    sampler.start()
    while True:
        while not ready:
            loop.process_events()
        batch, indices, device = ready.pop()
        yield batch["rewards"].numel(), None
        sampler.yield_trajectory_buffers(indices, device)


def configuration(name: str, frames: int, steps: int, batched: bool) -> Any:
    """Sample Factory's settings for the environments that are registered as `name`."""
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args

    settings = {
        "env": name,
        "device": "cpu",
        "env_gpu_actions": False,
        "env_gpu_observations": False,
        "serial_mode": True,
        "batched_sampling": batched,
        "async_rl": False,
        "num_workers": 1,
        "num_envs_per_worker": 1,
        "worker_num_splits": 1,
        "rollout": steps,
        "batch_size": frames,
        "num_batches_per_epoch": 1,
        "use_rnn": False,
        "recurrence": 1,
        "normalize_input": False,
        "normalize_returns": False,
        "benchmark": True,
    }
    arguments = [f"--{key}={value}" for key, value in settings.items()]
    parser, _ = parse_sf_args(arguments)
    return parse_full_cfg(parser, arguments)


def adapt() -> None:
    """Lets Sample Factory run with the present Gymnasium and numpy."""
    from sample_factory.algo.utils.make_env import BatchedListToDictWrapper
    from sample_factory.algo.utils.tensor_dict import TensorDict

    # Wrappers no longer have the attributes of what they wrap.
    for name in ("num_agents", "is_multiagent"):
        setattr(BatchedListToDictWrapper, name, property(lambda self, n=name: getattr(self.env, n)))

    # An array with one element is no longer a number.
    write = TensorDict._set_data_func
    if write.__name__ == "write_numbers":
        return

    def write_numbers(self: Any, into: Any, index: Any, data: Any) -> None:
        if isinstance(into, np.ndarray) and into.ndim == 1 and np.size(data) == 1:
            data = data.reshape(())
        write(self, into, index, data)

    TensorDict._set_data_func = write_numbers
