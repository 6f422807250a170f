"""TorchRL's trainers, with collectors whose workers are Ray actors."""

import os
import sys

import pytest

pytest.importorskip("torchrl")
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "interop"))
from trainer_parts import AGENTS, FRAMES, QUIET, TOTAL, Followed

from trawl.collectors.distributed import RayCollector

pytestmark = [pytest.mark.usefixtures("cluster"), *QUIET]
FREE = {"num_cpus": 0, "memory": 0}


def collector_of(agent, sync, **options):
    options = {"frames_per_batch": FRAMES, "total_frames": TOTAL, "remote_configs": FREE, **options}
    return RayCollector([agent.env] * 2, agent.policy, sync=sync, **options)


def test_it_trains():
    agent = AGENTS["ppo"]()
    trainer = agent.trainer(
        collector_of(agent, sync=True), weight_update_map={"policy": agent.path}
    )
    followed = Followed(agent, trainer)
    followed.train()
    assert followed.ages == [0] * (TOTAL // FRAMES)


def test_it_is_chosen_in_a_configuration():
    pytest.importorskip("hydra")
    from hydra_parts import followed, trainer_of

    options = {"backend": "ray", "num_collectors": 2, "sync": "true"}
    trainer = trainer_of("sac", *(f"collector.{name}={value}" for name, value in options.items()))
    assert type(trainer.collector) is RayCollector
    seen = followed("sac", trainer)
    trainer.train()
    assert seen.ages == [0] * (TOTAL // FRAMES)
