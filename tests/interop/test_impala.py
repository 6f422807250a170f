"""The pattern of TorchRL's IMPALA scripts, with workers in processes and process groups."""

import pytest
from impala import FRAMES, TOTAL, check

from trawl.collectors import Collector, MultiAsyncCollector
from trawl.collectors.distributed import DistributedCollector, RPCCollector

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:torchrl")


def test_processes():
    check(
        lambda envs, actor: MultiAsyncCollector(
            create_env_fn=envs,
            policy=actor,
            frames_per_batch=FRAMES,
            total_frames=TOTAL,
            device="cpu",
            storing_device="cpu",
            max_frames_per_traj=-1,
            update_at_each_batch=True,
        )
    )


@pytest.mark.parametrize(
    "kind", [DistributedCollector, pytest.param(RPCCollector, marks=pytest.mark.long)]
)
def test_clusters(kind):
    own = {"num_workers_per_collector": 1} if kind is DistributedCollector else {}
    check(
        lambda envs, actor: kind(
            create_env_fn=envs,
            policy=actor,
            frames_per_batch=FRAMES,
            total_frames=TOTAL,
            collector_class=Collector,
            collector_kwargs={"device": "cpu", "storing_device": "cpu"},
            storing_device="cpu",
            launcher="mp",
            **own,
        )
    )
