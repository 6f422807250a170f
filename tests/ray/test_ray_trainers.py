"""TorchRL's trainers, with collectors whose workers are Ray actors."""

import os
import sys

import pytest

pytest.importorskip("torchrl")
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "interop"))
from trainer_parts import AGENTS, FRAMES, MANY, QUIET, TOTAL, Followed, buffer_of

from trawl.collectors.distributed import RayCollector

pytestmark = [pytest.mark.usefixtures("cluster"), *QUIET]
FREE = {"num_cpus": 0, "memory": 0}


def collector_of(agent, sync, **options):
    options = {"frames_per_batch": FRAMES, "total_frames": TOTAL, "remote_configs": FREE, **options}
    return RayCollector([agent.env] * 2, agent.policy, sync=sync, **options)


@pytest.mark.parametrize(
    ("name", "sync"), [("ppo", True), pytest.param("dqn", False, marks=pytest.mark.long)]
)
def test_it_trains(name, sync):
    agent = AGENTS[name]()
    mapped = {"weight_update_map": {"policy": agent.path}} if name == "ppo" else {}
    trainer = agent.trainer(collector_of(agent, sync), **mapped)
    followed = Followed(agent, trainer)
    followed.train()
    if sync:
        assert followed.ages == [0] * (TOTAL // FRAMES)


@pytest.mark.long
def test_it_trains_while_frames_come():
    agent = AGENTS["dqn"]()
    buffer = buffer_of(TOTAL)
    collector = collector_of(agent, False, replay_buffer=buffer, total_frames=MANY)
    trainer = agent.async_trainer(collector, buffer)
    before = agent.weights().clone()
    trainer.train()
    assert (agent.weights() != before).any()
    assert collector.stats()["frames"] == buffer.write_count >= MANY


def test_it_is_chosen_in_a_configuration():
    pytest.importorskip("hydra")
    from hydra_parts import followed, trainer_of

    options = {"backend": "ray", "num_collectors": 2, "sync": "true"}
    trainer = trainer_of("sac", *(f"collector.{name}={value}" for name, value in options.items()))
    assert type(trainer.collector) is RayCollector
    seen = followed("sac", trainer)
    trainer.train()
    assert seen.ages == [0] * (TOTAL // FRAMES)
