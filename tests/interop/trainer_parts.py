"""Small agents for TorchRL's trainers, and a check that workers act by the learner's weights."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Categorical, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement
from torchrl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import (
    MLP,
    EGreedyModule,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss, DQNLoss, SACLoss, SoftUpdate
from torchrl.trainers.algorithms import DQNTrainer, PPOTrainer, SACTrainer

FRAMES = 32
TOTAL = 4 * FRAMES
# So many that they have not all come when a trainer first looks, 0.1 s after its collector began.
MANY = 16 * TOTAL
QUIET = [
    pytest.mark.filterwarnings("ignore:.*experimental/prototype feature:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*hook stage will be replaced:FutureWarning"),
    # Of TorchRL's configurations, loss modules and target networks.
    pytest.mark.filterwarnings("ignore:.*:UserWarning:torchrl"),
]


def returns():
    # Under the name by which the trainers log it.
    return RewardSum(in_keys=["reward"], out_keys=["reward_sum"])


def cartpole():
    return TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), returns())


def pendulum():
    env = TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(max_steps=20))
    return env.append_transform(returns())


def actor():
    net = nn.Sequential(MLP(3, 2, num_cells=[16]), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )


def buffer_of(size, sampler=RandomSampler):
    storage = LazyTensorStorage(size)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler(), batch_size=16)


class Agent:
    """A policy, and the trainer of TorchRL that improves it.

    Attributes:
        policy: what collectors act by.
        value: its part without random numbers.
        output: what that part writes.
        path: where the policy is found in the trainer.
    """

    def __init__(self):
        self.options = {
            "loss_module": self.loss,
            "optimizer": torch.optim.SGD(self.loss.parameters(), lr=0.05),
            "total_frames": TOTAL,
            "frame_skip": 1,
            "optim_steps_per_batch": 2,
            "progress_bar": False,
            "log_interval": FRAMES,
        }

    def weights(self):
        return TensorDict.from_module(self.value).data

    def async_trainer(self, collector, buffer):
        """One that learns while many frames come, by steps so small that it does not diverge."""
        optimizer = torch.optim.SGD(self.loss.parameters(), lr=1e-4)
        options = {"total_frames": MANY, "optimizer": optimizer}
        return self.trainer(collector, buffer, async_collection=True, **options)


class PPO(Agent):
    env = staticmethod(pendulum)
    output, path = "loc", "loss_module.actor_network"

    def __init__(self):
        self.policy = actor()
        self.value = self.policy[0]
        critic = ValueOperator(MLP(3, 1, num_cells=[16]), in_keys=["observation"])
        self.loss = ClipPPOLoss(self.policy, critic)
        super().__init__()

    def trainer(self, collector, buffer=None, **options):
        if buffer is None:
            buffer = buffer_of(FRAMES, SamplerWithoutReplacement)
        options = {"num_epochs": 1, "replay_buffer": buffer, **self.options, **options}
        return PPOTrainer(collector=collector, **options)


class DQN(Agent):
    env = staticmethod(cartpole)
    output, path = "action_value", "greedy"

    def __init__(self):
        net = MLP(4, 2, num_cells=[16])
        self.value = QValueActor(net, in_keys=["observation"], action_space="categorical")
        self.greedy = EGreedyModule(Categorical(2), annealing_num_steps=TOTAL)
        self.policy = TensorDictSequential(self.value, self.greedy)
        self.loss = DQNLoss(self.value, delay_value=True, action_space="categorical")
        super().__init__()

    def trainer(self, collector, buffer=None, **options):
        options = {
            "replay_buffer": buffer_of(TOTAL) if buffer is None else buffer,
            "target_net_updater": SoftUpdate(self.loss, eps=0.99),
            "greedy_module": self.greedy,
            **self.options,
            **options,
        }
        return DQNTrainer(collector=collector, **options)


class SAC(Agent):
    env = staticmethod(pendulum)
    output, path = "loc", "loss_module.actor_network"

    def __init__(self):
        self.policy = actor()
        self.value = self.policy[0]
        critic = ValueOperator(MLP(4, 1, num_cells=[16]), in_keys=["observation", "action"])
        self.loss = SACLoss(self.policy, critic)
        super().__init__()

    def trainer(self, collector, buffer=None, **options):
        options = {
            "replay_buffer": buffer_of(TOTAL) if buffer is None else buffer,
            "target_net_updater": SoftUpdate(self.loss, eps=0.99),
            **self.options,
            **options,
        }
        return SACTrainer(collector=collector, **options)


AGENTS = {"ppo": PPO, "dqn": DQN, "sac": SAC}


class Followed:
    """Compares what is in batches with what the learner's weights give.

    Attributes:
        ages: for each batch, how many times weights had been sent since those that it was
            collected with.
    """

    def __init__(self, agent, trainer):
        self.agent, self.trainer = agent, trainer
        self.sent = [agent.weights().clone()]
        self.ages = []
        trainer.register_op("batch_process", self.compare)
        # After the trainer's own, which sends them.
        trainer.register_op("post_steps", self.note)

    def train(self):
        """Trains to the end: all frames are taken, and the weights change."""
        before = self.agent.weights().clone()
        self.trainer.train()
        assert self.trainer.collected_frames == TOTAL
        assert len(self.ages) == TOTAL // FRAMES
        assert (self.agent.weights() != before).any()

    def note(self):
        self.sent.append(self.agent.weights().clone())

    def compare(self, batch):
        found = [self.fits(batch, weights) for weights in reversed(self.sent)]
        assert any(found), "the batch was collected with weights that the learner never sent"
        self.ages.append(found.index(True))
        return batch

    def fits(self, batch, weights):
        given = TensorDict(observation=batch["observation"], batch_size=batch.shape)
        with torch.no_grad(), weights.to_module(self.agent.value):
            expected = self.agent.value(given)[self.agent.output]
        return torch.allclose(batch[self.agent.output], expected, atol=1e-5)
