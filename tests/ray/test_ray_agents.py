"""PettingZoo environments in Ray actors."""

import pytest
import torch

from trawl.collectors.distributed import RayCollector

pytest.importorskip("mpe2")


@pytest.mark.usefixtures("cluster")
def test_agents_in_an_actor():
    options = {"frames_per_batch": 50, "sync": True, "num_collectors": 1}
    with RayCollector(
        "pettingzoo:mpe2/simple_spread_v3", None, remote_configs={"num_cpus": 0}, **options
    ) as collector:
        (batch,) = collector.next()
    assert batch["agent", "observation"].shape == (50, 3, 18)
    following = batch["next", "agent", "observation"][:-1]
    goes_on = ~batch["next", "done"][:-1, 0]
    assert torch.equal(following[goes_on], batch["agent", "observation"][1:][goes_on])
    assert batch["next", "done"].sum() == 2
