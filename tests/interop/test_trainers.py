"""TorchRL's trainers, with Trawl's collectors in the place of TorchRL's."""

import copy

import pytest
import torch
from tensordict import TensorDict
from trainer_parts import AGENTS, FRAMES, MANY, QUIET, TOTAL, Followed, buffer_of

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.weight_update import MultiProcessWeightSyncScheme

pytestmark = QUIET


def collectors(agent, kind, **options):
    options = {"frames_per_batch": FRAMES, "total_frames": TOTAL, **options}
    policy = options.pop("policy", agent.policy)
    if kind is Collector:
        return Collector(agent.env, policy, **options)
    return kind([agent.env] * 2, policy, **options)


KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]
LONG = pytest.mark.long


def some(kinds):
    """Each agent with every kind; what shows no more than others takes part in long runs only."""
    return [
        pytest.param(name, kind, marks=[] if j % len(AGENTS) == i else LONG)
        for i, name in enumerate(AGENTS)
        for j, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(("name", "kind"), some(KINDS))
def test_it_trains(name, kind):
    torch.manual_seed(0)
    agent = AGENTS[name]()
    # With workers, PPO's trainer asks where the weights of each model come from.
    mapped = kind is not Collector and name == "ppo"
    options = {"weight_update_map": {"policy": agent.path}} if mapped else {}
    trainer = agent.trainer(collectors(agent, kind), **options)
    followed = Followed(agent, trainer)
    followed.train()
    if kind is not MultiAsyncCollector:
        assert followed.ages == [0] * (TOTAL // FRAMES)


@pytest.mark.parametrize("strategy", ["tensordict", pytest.param("state_dict", marks=LONG)])
def test_weights_of_named_models(strategy):
    agent = AGENTS["ppo"]()
    schemes = {"policy": MultiProcessWeightSyncScheme(strategy)}
    collector = collectors(agent, MultiSyncCollector, weight_sync_schemes=schemes)
    trainer = agent.trainer(collector, weight_update_map={"policy": agent.path})
    followed = Followed(agent, trainer)
    trainer.train()
    assert followed.ages == [0] * (TOTAL // FRAMES)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dqn", Collector),
        pytest.param("sac", MultiSyncCollector, marks=LONG),
        pytest.param("dqn", MultiAsyncCollector, marks=LONG),
    ],
)
def test_it_trains_while_frames_come(name, kind):
    agent = AGENTS[name]()
    buffer = buffer_of(TOTAL)
    # `DQNLoss` takes the parameters out of the learner's module for moments, in which no other
    # thread can use it.
    policy = copy.deepcopy(agent.policy) if kind is Collector else agent.policy
    collector = collectors(agent, kind, policy=policy, replay_buffer=buffer, total_frames=MANY)
    trainer = agent.async_trainer(collector, buffer)
    before = agent.weights().clone()
    trainer.train()
    assert (agent.weights() != before).any()
    if kind is Collector:
        assert (TensorDict.from_module(policy[0]).data != before).any()
    assert collector.stats()["frames"] == buffer.write_count >= MANY
