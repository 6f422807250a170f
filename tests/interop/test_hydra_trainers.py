"""TorchRL's trainers in Hydra's configurations, in which a collector's class is replaced."""

import pytest
import torch
from trainer_parts import MANY, QUIET

pytest.importorskip("hydra")
from hydra.utils import instantiate
from hydra_parts import Configured, collector_of, followed, trainer_of
from test_trainers import LONG, some

from trawl.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector

pytestmark = QUIET
KINDS = {
    "sync": Collector,
    "async": AsyncCollector,
    "multi_sync": MultiSyncCollector,
    "multi_async": MultiAsyncCollector,
}


def check(name, kind, *overrides):
    torch.manual_seed(0)
    trainer = trainer_of(name, *overrides)
    assert type(trainer.collector) is kind
    seen = followed(name, trainer)
    seen.train()
    return seen.ages


@pytest.mark.parametrize(("name", "kind"), some(KINDS))
def test_it_trains(name, kind):
    ages = check(name, KINDS[kind], *collector_of(kind))
    if kind in ("sync", "multi_sync"):
        assert ages == [0] * len(ages)


def configured(name, **options):
    env = {"_target_": "gymnasium.make", "_partial_": True, "id": "CartPole-v1"}
    kwargs = [{"max_episode_steps": steps} for steps in (2, 3)]
    options |= {"_target_": f"trawl.collectors.{name}", "create_env_fn": [env, env]}
    return instantiate({**options, "create_env_kwargs": kwargs, "total_frames": 24})


def test_lists_in_a_configuration():
    """Hydra gives lists of its own class."""
    options = {"frames_per_batch": [6, 6], "cat_results": 0}
    with configured("MultiSyncCollector", device=["cpu", "cpu"], **options) as collector:
        several = [batch["next", "done"].flatten() for batch in collector]
    with configured("Collector", frames_per_batch=12) as collector:
        one = [batch["next", "done"].flatten() for batch in collector]
    expected = torch.tensor([0, 1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1]).bool()
    assert all((found == expected).all() for found in [*several, *one])
    assert len(several) == len(one) == 2


def test_a_backend_in_a_configuration():
    options = {"backend": "process", "num_collectors": 2, "sync": "true"}
    assert check("ppo", MultiSyncCollector, *collector_of("sync", **options)) == [0] * 4


@LONG
def test_schemes_of_a_configuration():
    """Workers write into a buffer that computes advantages, by a critic that gets new weights."""
    options = collector_of("multi_async", total_frames=MANY)
    trainer = trainer_of("ppo_async", f"trainer.total_frames={MANY}", *options)
    agent = Configured("ppo", trainer)
    before = agent.weights().clone()
    trainer.train()
    buffer = trainer.replay_buffer
    assert (agent.weights() != before).any()
    assert trainer.collector.stats()["frames"] == buffer.write_count >= MANY
    assert buffer[:]["advantage"].isfinite().all()
