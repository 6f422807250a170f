"""What the examples collect with, by TorchRL: the same environments, policies and settings.

The rest of an example, the learner and the evaluation, is the very same code. Where TorchRL has
nothing of the kind (a ratio of samples to frames, a command that writes datasets) a baseline does
by hand what its users do.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import TensorDictReplayBuffer, Unbounded
from torchrl.envs import GymEnv, GymWrapper, SerialEnv, TensorDictPrimer, TransformedEnv

import peers

# Spares TorchRL a wrapper around the policy, and a warning for each module.
QUICK = {"trust_policy": True, "auto_register_policy_transforms": False}


def ppo(config: Any, policy: nn.Module) -> Any:
    """`make_collector` of `examples/ppo.py`."""
    options = {
        "frames_per_batch": config.num_envs * config.num_steps,
        "total_frames": config.total_frames,
        **QUICK,
    }
    if not config.workers:
        return Collector(_ppo_envs(config, config.num_envs), policy, **options)
    make = partial(_ppo_envs, config, config.num_envs // config.workers)
    return MultiSyncCollector(
        [make] * config.workers, policy, cat_results=0, update_at_each_batch=True, **options
    )


def _ppo_envs(config: Any, count: int) -> Any:
    if not config.recurrent:
        return _vector(config.env_id, count)
    env = SerialEnv(count, partial(_blind_env, config.env_id), use_buffers=False)
    memory = Unbounded(shape=(config.hidden_size,))
    return TransformedEnv(env, TensorDictPrimer({"memory": memory}, expand_specs=True))


def _vector(env_id: str, count: int) -> Any:
    """The quickest that TorchRL has in one process: Gymnasium's vector environment."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    made = peers.sync_vector(partial(gymnasium.make, env_id), count, copy=True)
    return GymWrapper(made, categorical_action_encoding=True)


def _blind_env(env_id: str) -> Any:
    from ppo import Positions

    return GymWrapper(Positions(gymnasium.make(env_id)), categorical_action_encoding=True)


def dqn(config: Any, make_env: Any, policy: nn.Module, replay: TensorDictReplayBuffer) -> Any:
    """`make_collector` of `examples/dqn.py`."""
    return Collector(
        _vector(config.env_id, config.num_envs),
        TensorDictModule(policy, in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames,
        init_random_frames=config.random_frames,
        replay_buffer=replay,
        postproc=TensorDict.flatten,
        **QUICK,
    )


class Paced:
    """Workers and a learner in step, by iteration.

    What TorchRL starts in the background has no end and is not held back: the worker would fill the
    buffer with what a policy did that has learned nothing, and take the learner's processor.
    """

    def __init__(self, collector: Any, config: Any) -> None:
        self._collector, self._config = collector, config
        self._frames = self._samples = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collector, name)

    def start(self) -> None:
        """Begins to iterate."""
        self._batches = iter(self._collector)

    def stats(self) -> None:
        """Takes the next batch; the example asks until the first frames are there."""
        next(self._batches)
        self._frames += self._config.frames_per_batch

    def sample(self) -> Any:
        """A minibatch, once there are as many frames as it takes."""
        self._samples += 1
        config = self._config
        each = config.minibatch_size / config.samples_per_insert
        needed = min(config.random_frames + self._samples * each, config.total_frames)
        while self._frames < needed:
            self.stats()
        return self._collector.replay_buffer.sample()

    def async_shutdown(self) -> None:
        """Ends it."""
        self._collector.shutdown()


def sac(config: Any, make_env: Any, policy: nn.Module, replay: TensorDictReplayBuffer) -> Any:
    """`make_collector` of `examples/sac.py`."""
    collector = MultiAsyncCollector(
        [partial(GymEnv, config.env_id)] * config.workers,
        policy,
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames,
        init_random_frames=config.random_frames,
        replay_buffer=replay,
        **QUICK,
    )
    return Paced(collector, config)


def controller(observation: Tensor) -> Tensor:
    """That of `examples/offline.py`, which would import Trawl here."""
    position, velocity, angle, turning = observation.unbind(-1)
    right = 0.05 * position + 0.1 * velocity + angle + 0.5 * turning > 0
    return nn.functional.one_hot(right.long(), 2)


def offline(config: Any, directory: Path) -> None:
    """`collect` of `examples/offline.py`: a program of its own, too, that writes with Minari."""
    command = [sys.executable, __file__, config.env_id, str(config.frames), str(config.seed)]
    path = os.pathsep.join(sys.path)
    environment = {"PYTHONPATH": path, "MINARI_DATASETS_PATH": str(directory.parent)}
    subprocess.run([*command, directory.name], check=True, env={**os.environ, **environment})


def write(env_id: str, frames: int, seed: int, name: str) -> None:
    """Collects with the controller of `examples/offline.py`, and writes a dataset."""
    import minari
    from minari.data_collector import EpisodeBuffer

    collector = Collector(
        GymEnv(env_id),
        TensorDictModule(controller, in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=1000,
        total_frames=frames,
        **QUICK,
    )
    collector.set_seed(seed)
    batch = torch.cat([part.clone() for part in collector])
    collector.shutdown()
    ends = (batch["next", "done"].squeeze(-1).nonzero().squeeze(-1) + 1).tolist()
    episodes = []
    for begin, end in zip([0, *ends], [*ends, frames], strict=True):
        part = batch[begin:end]
        if len(part):
            last = part["next", "observation"][-1:]
            following = part["next"]
            cut = following["truncated"].squeeze(-1).numpy().copy()
            cut[-1] |= not following["done"][-1]
            episodes.append(
                EpisodeBuffer(
                    observations=torch.cat([part["observation"], last]).numpy(),
                    actions=part["action"].argmax(-1).numpy(),
                    rewards=following["reward"].squeeze(-1).double().numpy(),
                    terminations=following["terminated"].squeeze(-1).numpy(),
                    truncations=cut,
                )
            )
    env = gymnasium.make(env_id)
    minari.create_dataset_from_buffers(name, episodes, env=env, data_format="arrow")


BASELINES: dict[str, Callable[..., Any]] = {"ppo": ppo, "dqn": dqn, "sac": sac, "offline": offline}

if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
