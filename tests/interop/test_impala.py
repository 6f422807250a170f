"""The pattern of TorchRL's IMPALA scripts, with workers in processes and process groups."""

import pytest
from impala import FRAMES, TOTAL, check

from trawl.collectors import Collector, MultiAsyncCollector
from trawl.collectors.distributed import DistributedCollector

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


def test_clusters():
    check(
        lambda envs, actor: DistributedCollector(
            create_env_fn=envs,
            policy=actor,
            frames_per_batch=FRAMES,
            total_frames=TOTAL,
            collector_class=Collector,
            num_workers_per_collector=1,
            collector_kwargs={"device": "cpu", "storing_device": "cpu"},
            storing_device="cpu",
            launcher="mp",
        )
    )
