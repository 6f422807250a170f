"""PettingZoo environments in collectors over networks."""

import pytest
import torch
from distributed_parts import make

from trawl.collectors.distributed import DistributedCollector

pytest.importorskip("mpe2")
SPREAD = "pettingzoo:mpe2/simple_spread_v3"


def test_agents_in_a_process_group():
    options = {"create_env_fn": SPREAD, "policy": None, "num_workers": 1, "sync": True}
    with make(DistributedCollector, frames_per_batch=50, **options) as collector:
        (batch,) = collector.next()
    assert batch["agent", "observation"].shape == (50, 3, 18)
    assert batch["next", "agent", "reward"].shape == (50, 3, 1)
    following = batch["next", "agent", "observation"][:-1]
    goes_on = ~batch["next", "done"][:-1, 0]
    assert torch.equal(following[goes_on], batch["agent", "observation"][1:][goes_on])
    assert batch["next", "done"].sum() == 2
