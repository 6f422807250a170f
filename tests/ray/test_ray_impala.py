"""The pattern of TorchRL's IMPALA scripts, with workers that are Ray actors."""

import os
import sys

import pytest

pytest.importorskip("torchrl")
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "interop"))
from impala import FRAMES, TOTAL, check

from trawl.collectors import Collector
from trawl.collectors.distributed import RayCollector

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:torchrl"),
]


def test_actors():
    # As the script's configuration has them.
    config = {"address": None, "num_cpus": None, "num_gpus": None, "ignore_reinit_error": False}
    check(
        lambda envs, actor: RayCollector(
            create_env_fn=envs,
            policy=actor,
            collector_class=Collector,
            frames_per_batch=FRAMES,
            total_frames=TOTAL,
            max_frames_per_traj=-1,
            ray_init_config=config,
            remote_configs={"num_cpus": 0, "num_gpus": 0, "memory": 0},
            sync=False,
            update_after_each_batch=True,
        )
    )
