"""Environments of JAX whose arrays are on a GPU, or on the CPU in miniature."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from tests.cuda.device import DEVICE, ON_GPU
from tests.envs.jax_parts import Scripted
from trawl.collectors import Collector
from trawl.envs import JaxEnv

jax = pytest.importorskip("jax")


class Chooses(nn.Module):
    """Policy that takes the action that the observation's second value names."""

    def forward(self, observation: Tensor) -> Tensor:
        return nn.functional.one_hot(observation[..., 1].long() % 4, 4)


def test_the_data_stay_on_the_device() -> None:
    if ON_GPU and not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("this JAX has no GPU")
    policy = TensorDictModule(Chooses(), in_keys=["observation"], out_keys=["action"])
    expected = None
    for device in (DEVICE, "cpu"):
        env = JaxEnv(Scripted(), 8, device=device)
        with Collector(env, policy, frames_per_batch=80) as collector:
            collector.set_seed(0)
            batch = collector.next()
        assert batch["observation"].device == torch.device(device)
        found = batch["next", "observation"].cpu()
        assert expected is None or torch.equal(found, expected)
        expected = found
