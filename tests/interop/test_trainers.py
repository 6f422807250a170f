"""TorchRL's trainers, with Trawl's collectors in the place of TorchRL's."""

import pytest
import torch
from trainer_parts import AGENTS, FRAMES, TOTAL, Followed, buffer_of

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.weight_update import SharedMemWeightSyncScheme

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*experimental/prototype feature:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*hook stage will be replaced:FutureWarning"),
    # Of TorchRL's loss modules and target networks.
    pytest.mark.filterwarnings("ignore:.*:UserWarning:torchrl"),
]


def collectors(agent, kind, **options):
    options = {"frames_per_batch": FRAMES, "total_frames": TOTAL, **options}
    if kind is Collector:
        return Collector(agent.env, agent.policy, **options)
    return kind([agent.env] * 2, agent.policy, **options)


KINDS = pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])


@pytest.mark.parametrize("name", AGENTS)
@KINDS
def test_it_trains(name, kind):
    torch.manual_seed(0)
    agent = AGENTS[name]()
    # With workers, PPO's trainer asks where the weights of each model come from.
    named = kind is not Collector and name == "ppo"
    options = {"weight_update_map": {"policy": agent.path}} if named else {}
    trainer = agent.trainer(collectors(agent, kind), **options)
    followed = Followed(agent, trainer)
    before = followed.sent[0]
    trainer.train()
    assert trainer.collected_frames == TOTAL
    assert len(followed.ages) == TOTAL // FRAMES
    assert (followed.weights() != before).any()
    if kind is not MultiAsyncCollector:
        assert followed.ages == [0] * (TOTAL // FRAMES)
    else:
        # Workers are a batch or two ahead of the learner.
        assert followed.ages[-1] < len(followed.sent) - 1
