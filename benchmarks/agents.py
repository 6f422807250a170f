"""Cases with several agents: PettingZoo environments in a vector."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from hand import FLAGS
from harness import HAND, TRAWL, Case, Contender, Source
from peers import torchrl, trawl

FRAMES = 1000
ENVS = 8
STEPS = FRAMES // ENVS
OBSERVATION, CHOICES = 18, 5


def spread() -> Any:
    """Three agents that cover three landmarks."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env()


class Greedy(nn.Module):
    """An untrained network; the action is its largest output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(OBSERVATION, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)
        )

    def forward(self, observation: Tensor) -> Tensor:
        """Returns the action of each agent."""
        return self.net(observation).argmax(-1)


def by_hand(module: nn.Module) -> Source:
    """Writes straight into memory that is allocated once."""
    envs = [spread() for _ in range(ENVS)]
    agents = envs[0].possible_agents
    sizes = (STEPS, ENVS, len(agents))
    seen, after = torch.zeros(*sizes, OBSERVATION), torch.zeros(*sizes, OBSERVATION)
    action, reward = torch.zeros(*sizes, dtype=torch.int64), torch.zeros(*sizes, 1)
    own = {name: torch.zeros(*sizes, 1, dtype=torch.bool) for name in FLAGS}
    root = {name: torch.zeros(*sizes[:2], 1, dtype=torch.bool) for name in FLAGS}
    ids = torch.zeros(*sizes[:2], dtype=torch.int64)
    batch = TensorDict(
        {
            "agent": {"observation": seen, "action": action}
            | {name: torch.zeros_like(flag) for name, flag in own.items()},
            **{name: torch.zeros_like(flag) for name, flag in root.items()},
            "next": {"agent": {"observation": after, "reward": reward, **own}, **root},
            "collector": {"traj_ids": ids},
        },
        sizes[:2],
    )
    delivered = batch.transpose(0, 1)
    rows, rows_after, actions, rewards = (
        tensor.numpy() for tensor in (seen, after, action, reward)
    )
    flags, root_flags = ({k: v.numpy() for k, v in one.items()} for one in (own, root))
    numbers, trajectory = ids.numpy(), np.arange(ENVS)
    current = np.zeros((ENVS, len(agents), OBSERVATION), np.float32)
    for i, env in enumerate(envs):
        observations, _ = env.reset(seed=i)
        for j, agent in enumerate(agents):
            current[i, j] = observations[agent]
    while True:
        for one in (*own.values(), *root.values()):
            one.zero_()
        with torch.no_grad():
            for t in range(STEPS):
                rows[t], numbers[t] = current, trajectory
                actions[t] = module(seen[t]).numpy()
                for i, env in enumerate(envs):
                    chosen = dict(zip(agents, actions[t, i].tolist(), strict=True))
                    observations, earned, terminated, truncated, _ = env.step(chosen)
                    for j, agent in enumerate(agents):
                        rows_after[t, i, j] = observations[agent]
                        rewards[t, i, j] = earned[agent]
                    current[i] = rows_after[t, i]
                    if any(terminated.values()) or any(truncated.values()):
                        for j, agent in enumerate(agents):
                            flags["terminated"][t, i, j] = terminated[agent]
                            flags["truncated"][t, i, j] = truncated[agent]
                            flags["done"][t, i, j] = terminated[agent] or truncated[agent]
                        for name, flag in root_flags.items():
                            flag[t, i] = flags[name][t, i].any()
                        trajectory[i] = trajectory.max() + 1
                        observations, _ = env.reset()
                        for j, agent in enumerate(agents):
                            current[i, j] = observations[agent]
        yield FRAMES, delivered


def spread8() -> Case:
    """Eight environments in a list, with three agents each."""
    module = Greedy()
    policy = TensorDictModule(module, [("agent", "observation")], [("agent", "action")])

    def serial() -> Any:
        from torchrl.envs import PettingZooWrapper, SerialEnv

        warnings.filterwarnings("ignore", "PettingZoo in TorchRL")
        return SerialEnv(ENVS, lambda: PettingZooWrapper(spread()))

    return Case(
        "spread8",
        "8 PettingZoo simple_spread (3 agents), MLP 2x64",
        (
            Contender(TRAWL, lambda: trawl([spread] * ENVS, policy, FRAMES)),
            Contender(HAND, lambda: by_hand(module), 0.9),
            Contender("TorchRL", lambda: torchrl(serial(), policy, FRAMES), 4.0),
        ),
    )


CASES = {"spread8": spread8}
