"""What programs written for TorchRL do with collectors, transports and schemes of Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector
from trawl.weight_update import RayModuleTransformScheme, RayTransport, RayWeightSyncScheme

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("sent_by_value")


def policy(value: float | None = None) -> TensorDictModule:
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    if value is not None:
        nn.init.constant_(module.weight, value)
    return TensorDictModule(module, ["observation"], ["action"])


class Receiving:
    """An actor that takes weights by a transport of its own."""

    def __init__(self, backend: str) -> None:
        self.transport = RayTransport(worker_idx=3, backend=backend, model_id="critic")
        self.model = nn.Linear(3, 1)
        self.transport.set_model(self.model)

    def receive(self, timeout: float | None) -> Any:
        found = self.transport.receive_weights(timeout)
        if found is None:
            return None
        return float(self.model.weight.mean()), self.transport.model_version


class Collecting:
    """An actor that is called with weights, as a collector is."""

    def __init__(self) -> None:
        self.model = policy()

    def update_policy_weights_(self, weights: Any) -> None:
        self.mean = float(weights["module", "weight"].mean())

    def found(self) -> float:
        return self.mean


@pytest.mark.parametrize("backend", ["gloo", "object_store"])
def test_an_actor_takes_weights_by_a_transport(cluster, backend):
    actor = ray.remote(Receiving).options(num_cpus=0).remote(backend)
    transport = RayTransport(remote_actor=actor, worker_idx=3, backend=backend, model_id="critic")
    with pytest.raises(RuntimeError, match=r"call send_weights_async\(\) before"):
        transport.wait_ack()
    assert ray.get(actor.receive.remote(0.01)) is None
    model = nn.Linear(3, 1)
    for number in (1.0, 2.0):
        nn.init.constant_(model.weight, number)
        transport.set_model_version(int(number))
        transport.send_weights_async(model)
        assert ray.get(actor.receive.remote(100.0)) == (number, int(number))
        transport.wait_ack(100.0)


def test_an_actor_that_is_a_collector_is_called_with_weights(cluster):
    actor = ray.remote(Collecting).options(num_cpus=0).remote()
    made = RayWeightSyncScheme().create_transport(remote_collector=actor)
    assert isinstance(made, RayTransport)
    made.send_weights(policy(5.0))
    assert ray.get(actor.found.remote()) == 5.0


@pytest.mark.parametrize("backend", ["gloo", "object_store"])
def test_the_module_of_a_transform_in_an_actor(cluster, backend):
    module = pytest.importorskip("torchrl.envs.transforms.module")
    envs = pytest.importorskip("torchrl.envs")
    # It writes what is there already: TorchRL asks for a spec of anything else.
    encoder = TensorDictModule(nn.Linear(3, 3), ["observation"], ["observation"])
    scheme = RayModuleTransformScheme(backend=backend)
    transform = module.RayModuleTransform(
        module=encoder, weight_sync_scheme=scheme, num_cpus=0, num_gpus=0
    )
    env = envs.TransformedEnv(envs.GymEnv("Pendulum-v1"), transform)
    with Collector(
        env, policy(), frames_per_batch=5, weight_sync_schemes={"transform_module": scheme}
    ) as collector:
        new = {"module.weight": torch.zeros(3, 3), "module.bias": torch.full((3,), 7.0)}
        collector.update_policy_weights_(new, model_id="transform_module")
        batch = collector.next()
    assert (batch["next", "observation"] == 7.0).all()


def test_what_is_missing_or_unknown_is_named():
    with pytest.raises(ValueError, match=r"backend must be one of 'object_store', 'gloo', .*nccl"):
        RayWeightSyncScheme(backend="nccl")
    with pytest.raises(ValueError, match="needs a transform"):
        RayModuleTransformScheme().init_on_sender()
