"""IMPALA as scripts for TorchRL write it: workers that act by older weights, and V-trace."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import GymEnv, InitTracker, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import VTrace

WORKERS = 2
FRAMES = 20
ROLLOUTS = 2  # of which the learner makes a batch
# Each third batch is followed by an update, as the others are stored first.
TOTAL = 8 * (ROLLOUTS + 1) * FRAMES
LOG_PROB = "sample_log_prob"


def make_env():
    env = TransformedEnv(GymEnv("CartPole-v1"))
    for transform in (InitTracker(), StepCounter(), RewardSum()):
        env.append_transform(transform)
    return env


def make_models():
    net = TensorDictModule(MLP(4, 2, num_cells=[16]), ["observation"], ["logits"])
    actor = ProbabilisticActor(
        net,
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
        log_prob_key=LOG_PROB,
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[16]), in_keys=["observation"])
    return actor, critic


@dataclass
class Run:
    """What a run of IMPALA saw.

    Attributes:
        frames: number of frames delivered.
        versions: for each batch, the number of the update whose weights it was collected with.
        updates: number of updates.
        ratios: the largest importance weight of each batch of the learner, as a logarithm.
    """

    frames: int = 0
    updates: int = 0
    versions: list[int] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


def train(make_collector):
    """Trains, and compares the log-probabilities in batches with those of the weights sent.

    Args:
        make_collector: makes the collector of a list of environments and a policy.
    """
    actor, critic = make_models()
    collector = make_collector([make_env()] * WORKERS, actor)
    advantage = VTrace(gamma=0.99, value_network=critic, actor_network=actor, average_adv=False)
    advantage.set_keys(sample_log_prob=LOG_PROB)
    loss_module = A2CLoss(actor_network=actor, critic_network=critic)
    loss_module.set_keys(sample_log_prob=LOG_PROB)
    optim = torch.optim.RMSprop(loss_module.parameters(), lr=0.01)
    size = FRAMES * ROLLOUTS
    with tempfile.TemporaryDirectory() as folder:
        buffer = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(size, scratch_dir=folder),
            sampler=SamplerWithoutReplacement(),
            batch_size=size,
        )
        return _loop(collector, actor, advantage, buffer, loss_module, optim)


def _loop(collector, actor, advantage, buffer, loss_module, optim):
    run, accumulator = Run(), []
    sent = [TensorDict.from_module(actor).data.clone()]
    for data in collector:
        run.frames += data.numel()
        run.versions.append(_version(data, actor, sent))
        if len(accumulator) < ROLLOUTS:
            accumulator.append(data)
            continue
        stacked = torch.stack(accumulator, dim=0).contiguous()
        with torch.no_grad():
            run.ratios.append(_ratio(stacked, actor))
            stacked = advantage(stacked)
        for rollout in stacked:
            buffer.extend(rollout.reshape(-1))
        for batch in buffer:
            losses = loss_module(batch)
            sum(loss for name, loss in losses.items() if name.startswith("loss_")).backward()
            optim.step()
            optim.zero_grad()
        sent.append(TensorDict.from_module(actor).data.clone())
        collector.update_policy_weights_()
        run.updates += 1
        accumulator = []
    collector.shutdown()
    return run


def _version(data, actor, sent):
    """The update whose weights give the log-probabilities of a batch."""
    for number, weights in reversed(list(enumerate(sent))):
        with weights.to_module(actor):
            if torch.allclose(_log_prob(data, actor), data[LOG_PROB], atol=1e-5):
                return number
    raise AssertionError("a batch is not of any weights that were sent")


def _ratio(data, actor):
    return float((_log_prob(data, actor) - data[LOG_PROB]).abs().max())


def _log_prob(data, actor):
    with torch.no_grad():
        return actor.get_dist(data.select("observation")).log_prob(data["action"])


def check(make_collector):
    """Checks that all frames come, and that each batch is of one of the weights sent."""
    run = train(make_collector)
    assert run.frames == TOTAL
    assert run.updates == TOTAL // FRAMES // (ROLLOUTS + 1)
    assert run.versions[0] == 0 < run.versions[-1]
    # V-trace has something to correct: some batches are of older weights than the learner's.
    assert max(run.ratios) > 0
