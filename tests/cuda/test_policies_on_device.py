"""Policies on a GPU, or on the CPU in miniature, and what they read and write."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.collectors.collector_parts import Chooses
from tests.cuda.device import CPU, DEVICE, ON_GPU, few, needs_gpu
from trawl.collectors import AsyncBatchedCollector, Collector
from trawl.rollout.layout import Leaf
from trawl.rollout.policy.device_transfer import DeviceTransfer
from trawl.testing import Ledger, NumberedEnv

pytestmark = pytest.mark.filterwarnings(
    "ignore:policy has no parameters to move", "ignore:.*registered in PyTree"
)
LENGTHS = (3, 5, 2)


class Chooser(nn.Module):
    """A policy for ``NumberedEnv`` with one weight: the number of the action."""

    def __init__(self, choice: int) -> None:
        super().__init__()
        self.choice = nn.Parameter(torch.tensor(float(choice)))

    def forward(self, observation: Tensor) -> Tensor:
        action = nn.functional.one_hot(self.choice.long(), 4)
        return action.expand(*observation.shape[:-1], 4)


class Control(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation)  # type: ignore[no-any-return]


@needs_gpu
def test_a_policy_elsewhere_is_copied() -> None:
    policy = Chooser(1)
    with Collector(NumberedEnv(), policy, frames_per_batch=4, policy_device=DEVICE) as collector:
        assert collector.policy is not policy
        assert collector.policy_device == DEVICE
        assert NumberedEnv.action_numbers(collector.next()).tolist() == [1] * 4
        assert policy.choice.device == CPU
        with torch.no_grad():
            policy.choice.fill_(3.0)
        collector.update_policy_weights_()
        assert NumberedEnv.action_numbers(collector.next()).tolist() == [3] * 4


@pytest.mark.parametrize("name", ["device", "storing_device"])
def test_batches_are_stored_on_the_device(name: str) -> None:
    options: dict[str, Any] = {name: DEVICE}
    with Collector(NumberedEnv(), Chooser(1), frames_per_batch=4, **options) as collector:
        batch = collector.next()
    assert {value.device for value in batch.values(True, True)} == {DEVICE}
    assert batch.device == DEVICE


@needs_gpu
@pytest.mark.parametrize("switch", ["cudagraph_policy", "compile_policy"])
def test_a_faster_policy_gives_the_same_actions(switch: str) -> None:
    policy, found = Control(), []
    for on in (False, True):
        options: dict[str, Any] = {"policy_device": DEVICE, switch: on}
        with Collector("Pendulum-v1", policy, frames_per_batch=32, **options) as collector:
            collector.set_seed(0)
            found.append(collector.next()["action"])
    torch.testing.assert_close(*found)


GRAPHS = [None, pytest.param(True, marks=needs_gpu)]


@pytest.mark.parametrize("place", ["threading", "multiprocessing"])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("config", [None, {"static_batch_size": 4}], ids=["any", "static"])
def test_the_policy_of_environments_that_are_ready(place: Any, graph: Any, config: Any) -> None:
    make = partial(NumberedEnv, lengths=LENGTHS)
    ledger = Ledger([make(number) for number in range(4)])
    with AsyncBatchedCollector(
        [partial(make, number) for number in range(4)],
        policy=Chooses(),
        frames_per_batch=50,
        total_frames=100,
        env_backend="threading",
        policy_backend=place,
        device=DEVICE,
        server_config=config,
        cudagraph_policy=graph,
    ) as collector:
        for batch in collector:
            ledger.add(batch)
    assert ledger.frames == 100


def test_rows_are_right_even_if_the_device_is_far_behind() -> None:
    wide = few(1 << 16, 64)
    leaves = {("x",): Leaf((wide,), torch.float32)}
    arrays = {("x",): np.zeros((2, wide), np.float32)}
    transfer = DeviceTransfer(DEVICE)
    sent = []
    for value in range(8):
        if ON_GPU:
            torch.cuda._sleep(20_000_000)
        arrays[("x",)][:] = value
        sent.append(transfer.send(leaves, arrays, np.array([0]))[("x",)])
    assert [one.unique().tolist() for one in sent] == [[value] for value in range(8)]
