"""Environments of JAX whose arrays are on a GPU, or on the CPU in miniature."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from tests.collectors.collector_parts import Chooses
from tests.cuda.device import DEVICE, ON_GPU
from tests.envs.jax_parts import Scripted
from trawl.collectors import Collector
from trawl.envs import JaxEnv

jax = pytest.importorskip("jax")


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
