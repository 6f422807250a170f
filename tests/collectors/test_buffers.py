"""TorchRL's buffers of all kinds are filled by collectors on this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from buffer_parts import BUFFERS, check_background, check_iteration, data
from collector_parts import by_step
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.weight_update import SharedMemWeightSyncScheme


def single(source: list[Any], **options: Any) -> Collector:
    return Collector(source[0], by_step(), frames_per_batch=20, **options)


def of(cls: Any, **where: Any) -> Any:
    def make(source: list[Any], **options: Any) -> Any:
        return cls(source, by_step(), frames_per_batch=20, **where, **options)

    return make


PLACES = {
    "single": single,
    "sync, inline": of(MultiSyncCollector, start_method="inline"),
    "async, inline": of(MultiAsyncCollector, start_method="inline"),
    "sync, processes": of(MultiSyncCollector),
    "async, processes": of(MultiAsyncCollector),
}
places = pytest.mark.parametrize("place", PLACES)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *[("single", kind) for kind in BUFFERS],
        ("sync, inline", "disk"),
        ("sync, inline", "prioritized"),
        ("async, inline", "list"),
        ("async, inline", "shared"),
        ("sync, processes", "memory"),
        ("sync, processes", "shared"),
        ("async, processes", "shared"),
        ("async, processes", "torchrl_prioritized"),
    ],
)
def test_iteration_fills_it_exactly(place: str, kind: str) -> None:
    check_iteration(PLACES[place], kind)


@pytest.mark.parametrize(
    ("place", "kind"),
    [("single", "memory"), ("sync, inline", "shared"), ("async, processes", "shared")],
)
def test_it_is_filled_step_by_step(place: str, kind: str) -> None:
    check_iteration(PLACES[place], kind, extend_buffer=False)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("single", "disk"),
        ("sync, inline", "memory"),
        ("async, inline", "prioritized"),
        ("sync, processes", "shared"),
        ("async, processes", "memory"),
    ],
)
def test_it_is_filled_in_the_background(place: str, kind: str) -> None:
    check_background(PLACES[place], BUFFERS[kind]())


def linear(output: str) -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(3, 1), ["observation"], [output])


@pytest.mark.parametrize(
    ("cls", "method"), [(MultiSyncCollector, "inline"), (MultiAsyncCollector, "forkserver")]
)
def test_a_model_in_a_transform_gets_its_weights(cls: Any, method: str) -> None:
    transforms = pytest.importorskip("torchrl.envs.transforms")
    model, name = linear("score"), "replay_buffer.transform[0].module"
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(100),
        transform=transforms.ModuleTransform(module=model),
        batch_size=10,
    )
    options = {"frames_per_batch": 20, "total_frames": 40, "start_method": method}
    options["weight_sync_schemes"] = {one: SharedMemWeightSyncScheme() for one in ("policy", name)}
    with cls(["Pendulum-v1"] * 2, linear("action"), replay_buffer=buffer, **options) as collector:
        collector.next()
        new = {"module.weight": torch.ones(1, 3), "module.bias": torch.ones(1)}
        collector.update_policy_weights_(weights_dict={name: new})
        collector.next()
        assert torch.equal(model.module.weight, torch.ones(1, 3))
        models = {name: linear("score"), "policy": linear("action")}
        collector.update_policy_weights_(weights_dict=models)
        assert torch.equal(model.module.weight, linear("score").module.weight)
        with pytest.raises(KeyError, match="missing"):
            collector.update_policy_weights_({"weight": torch.ones(1, 3)}, model_id=name)
    assert "score" in buffer.sample().keys()  # noqa: SIM118 - a TensorDict is no dict
