"""RLlib's `SingleAgentEnvRunner`: environments in one vector environment, without an algorithm.

Its batches are episodes, or parts of episodes, as numpy arrays. They hold what the batches of the
others hold, in RLlib's own form: an episode has an id, and its last observation is the true one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from torch import nn

from harness import Source

DistributionName = Literal["TorchDiagGaussian", "TorchSquashedGaussian", "TorchCategorical"]


def rllib(
    make: Callable[[], Any],
    net: nn.Module,
    count: int,
    frames: int,
    few_connectors: bool,
    distribution: DistributionName | None = None,
    limits: Mapping[str, float] | None = None,
) -> Source:
    """RLlib's runner of `count` environments.

    Args:
        make: Makes an environment.
        net: Returns actions, or the parameters of a distribution.
        count: Number of environments.
        frames: Frames of a batch.
        few_connectors: One connector, which makes a tensor of the observations, instead of the
            eleven that a runner has by default. The module then draws the actions itself.
        distribution: RLlib's class that draws the actions; None if `net` returns them.
        limits: Limits of the actions, for the distribution.
    """
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.connectors.connector_v2 import ConnectorV2
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.distribution.torch import torch_distribution
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.rllib.core.rl_module.torch import TorchRLModule
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    for name in ("ray", "ray.rllib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    drawn: Any = None
    if distribution is not None:
        drawn = getattr(torch_distribution, distribution)
    if limits is not None:
        drawn = drawn.get_partial_dist_cls(**limits)

    class Module(TorchRLModule):
        def setup(self) -> None:
            self.net = net
            self.action_dist_cls = drawn

        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            made = self.net(batch[Columns.OBS])
            return {Columns.ACTIONS if drawn is None else Columns.ACTION_DIST_INPUTS: made}

    class DrawingModule(Module):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            made = super()._forward(batch)
            if drawn is not None:
                actions = drawn.from_logits(made[Columns.ACTION_DIST_INPUTS])
                made[Columns.ACTIONS], made[Columns.ACTION_LOGP] = actions.sample_and_logp()
            return {key: value.numpy() for key, value in made.items()}

    class ObservationsToTensor(ConnectorV2):
        def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            batch[Columns.OBS] = torch.from_numpy(np.stack(kwargs[Columns.OBS]))
            return batch

    def vector(context: Any) -> Any:
        # Environments that RLlib makes itself have Gymnasium's checks around each step.
        return gymnasium.vector.SyncVectorEnv([make] * context["num_envs"])

    config = PPOConfig().environment(env=vector, normalize_actions=False)
    config.env_runners(num_envs_per_env_runner=count, gym_env_vectorize_mode="vector_entry_point")
    if few_connectors:
        config.env_runners(
            env_to_module_connector=lambda *args: ObservationsToTensor(),
            add_default_connectors_to_env_to_module_pipeline=False,
            add_default_connectors_to_module_to_env_pipeline=False,
        )
    module = DrawingModule if few_connectors else Module
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=module))
    with warnings.catch_warnings():
        # Each runner registers its environments under the same name.
        warnings.filterwarnings("ignore", ".*Overriding environment", UserWarning)
        runner = SingleAgentEnvRunner(config=config)
    runner.module.eval()  # a module in training is switched to evaluation and back in each step
    try:
        while True:
            episodes = runner.sample(num_timesteps=frames)
            runner.get_metrics()  # otherwise they keep all episodes
            yield sum(map(len, episodes)), None
    finally:
        runner.stop()
