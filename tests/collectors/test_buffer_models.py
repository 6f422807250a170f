"""Weights for models in the transforms of a replay buffer."""

import pytest
import torch
from multi_parts import CLASSES
from torch import nn

from trawl.weight_update import SharedMemWeightSyncScheme

data = pytest.importorskip("torchrl.data")
transforms = pytest.importorskip("torchrl.envs.transforms")
MODEL = "replay_buffer.transform[0].module"


def scorer():
    from tensordict.nn import TensorDictModule

    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(3, 1), ["observation"], ["score"])


@pytest.mark.parametrize(
    ("cls", "method"), list(zip(CLASSES, ["inline", "forkserver"], strict=True))
)
def test_a_model_in_the_buffer_gets_its_weights(cls, method):
    module = scorer()
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(100),
        transform=transforms.ModuleTransform(module=module),
        batch_size=10,
    )
    schemes = {name: SharedMemWeightSyncScheme() for name in ("policy", MODEL)}
    with cls(
        "Pendulum-v1",
        policy(),
        num_workers=2,
        frames_per_batch=20,
        total_frames=40,
        start_method=method,
        replay_buffer=buffer,
        weight_sync_schemes=schemes,
    ) as collector:
        collector.next()
        new = {"module.weight": torch.ones(1, 3), "module.bias": torch.ones(1)}
        collector.update_policy_weights_(weights_dict={MODEL: new})
        collector.next()
        assert torch.equal(module.module.weight, torch.ones(1, 3))
        collector.update_policy_weights_(weights_dict={MODEL: scorer(), "policy": policy()})
        assert torch.equal(module.module.weight, scorer().module.weight)
        with pytest.raises(KeyError, match="missing"):
            collector.update_policy_weights_({"weight": torch.ones(1, 3)}, model_id=MODEL)
    assert "score" in buffer.sample().keys()  # noqa: SIM118 - a TensorDict is no dict


def policy():
    from tensordict.nn import TensorDictModule

    return TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
