"""The cases of environments that Gymnasium does not make, with random actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import peers
from harness import HAND, TRAWL, Case, Contender, Source

FRAMES = 1000
DOMAIN, TASK = "cheetah", "run"


def dm_control() -> Case:
    return Case(
        "dm_control",
        f"dm_control {DOMAIN}/{TASK}, random actions",
        (
            Contender(TRAWL, lambda: peers.trawl(f"dm_control:{DOMAIN}/{TASK}", None, FRAMES)),
            Contender(HAND, _by_hand, 0.95),
            Contender("TorchRL", _torchrl, 3.0, "DMControlEnv; no discount"),
        ),
    )


def _by_hand() -> Source:
    """A loop over dm_control's own interface that writes into memory allocated once."""
    from dm_control import suite

    env, generator = suite.load(DOMAIN, TASK), np.random.default_rng(0)
    spec, timestep = env.action_spec(), env.reset()
    flags = ("done", "terminated", "truncated")
    seen = {name: torch.as_tensor(array) for name, array in timestep.observation.items()}

    def observed() -> dict[str, Any]:
        found = {
            name: torch.zeros(FRAMES, *one.shape, dtype=one.dtype) for name, one in seen.items()
        }
        found["discount"] = torch.zeros(FRAMES, 1)
        return found | {name: torch.zeros(FRAMES, 1, dtype=torch.bool) for name in flags}

    root, after = observed(), observed()
    after["reward"] = torch.zeros(FRAMES, 1)
    action = torch.zeros(FRAMES, *spec.shape, dtype=torch.float64)
    batch = TensorDict({**root, "action": action, "next": TensorDict(after, [FRAMES])}, [FRAMES])
    ids = torch.zeros(FRAMES, dtype=torch.int64)
    batch["collector", "traj_ids"] = ids
    before = {name: tensor.numpy() for name, tensor in root.items()}
    behind = {name: tensor.numpy() for name, tensor in after.items()}
    numbers, discount, trajectory = ids.numpy(), 1.0, 0
    while True:
        drawn = generator.uniform(spec.minimum, spec.maximum, (FRAMES, *spec.shape))
        action.numpy()[...] = drawn
        for t in range(FRAMES):
            for name, value in timestep.observation.items():
                before[name][t] = value
            before["discount"][t] = discount
            timestep = env.step(drawn[t])
            for name, value in timestep.observation.items():
                behind[name][t] = value
            discount, last = timestep.discount, timestep.last()
            behind["discount"][t] = discount
            behind["reward"][t] = timestep.reward
            behind["terminated"][t] = last and discount == 0
            behind["truncated"][t] = last and discount != 0
            behind["done"][t] = last
            numbers[t] = trajectory
            if last:
                timestep, discount, trajectory = env.reset(), 1.0, trajectory + 1
        yield FRAMES, batch


def _torchrl() -> Source:
    from torchrl.envs import DMControlEnv

    # Its batches have no discount, so their layout is not compared.
    for frames, _ in peers.torchrl(DMControlEnv(DOMAIN, TASK), None, FRAMES):
        yield frames, None


CASES = {"dm_control": dm_control}
