"""Rewards of several components, which an environment states by its reward_space."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from trawl.collectors import (
    AsyncBatchedCollector,
    Collector,
    Evaluator,
    MultiSyncCollector,
)
from trawl.envs import GymEnv, ParallelEnv
from trawl.observe import EpisodeStats


class Miner(gymnasium.Env):
    """Episodes of three steps with rewards (1, -2 * step); the handle makes it be replayed."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)
    reward_space = spaces.Box(-9, 9, (2,))

    def __init__(self):
        self.handle = (one for one in ())

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, "f4"), {}

    def step(self, action):
        self.time += 1
        reward = np.array([1.0, -2.0 * self.time], np.float32)
        return np.zeros(1, "f4"), reward, self.time == 3, False, {}


class Vector(gymnasium.vector.VectorEnv):
    """Two such environments, which reset in the step after the end."""

    num_envs = 2
    single_observation_space = Miner.observation_space
    single_action_space = Miner.action_space
    observation_space = spaces.Box(0, 1, (2, 1))
    action_space = spaces.MultiDiscrete([2, 2])
    metadata = {"autoreset_mode": "NextStep"}  # noqa: RUF012

    def __init__(self, batched):
        self.reward_space = spaces.Box(-9, 9, (2, 2) if batched else (2,))

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros((2, 1), "f4"), {}

    def step(self, action):
        self.time = 0 if self.time == 3 else self.time + 1
        rewards = np.array([[1.0, -2.0 * self.time]] * 2) * (self.time > 0)
        ended = np.full(2, self.time == 3)
        return np.zeros((2, 1), "f4"), rewards, ended, np.zeros(2, bool), {}


def act(observation):
    return torch.nn.functional.one_hot(torch.zeros(observation.shape[:-1], dtype=torch.long), 2)


KINDS = {
    "single": (Collector, Miner, (3,)),
    "processes": (Collector, lambda: ParallelEnv(2, Miner), (2, 3)),
    "vector": (Collector, lambda: Vector(False), (2, 3)),
    "vector with one space": (Collector, lambda: Vector(True), (2, 3)),
    "workers": (partial(MultiSyncCollector, start_method="inline"), lambda: [Miner] * 2, (2, 3)),
    "at its own pace": (AsyncBatchedCollector, lambda: [Miner], (3,)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_all_components(kind):
    cls, make, shape = KINDS[kind]
    with cls(make(), policy=act, frames_per_batch=int(np.prod(shape))) as collector:
        assert collector.stats().get("env_path", "array") == "array"
        first, stats = collector.next(), EpisodeStats()
        expected = torch.tensor([[1.0, -2.0], [1.0, -4.0], [1.0, -6.0]]).expand(*shape, 2)
        assert torch.equal(first["next", "reward"], expected)
        stats.update(first)
        assert stats.recent_return == collector.stats()["episode_return_mean"] == -4.5
        assert collector.fake_tensordict()["next", "reward"].shape == (*shape, 2)
        state, second = collector.state_dict(), collector.next().clone()
        collector.load_state_dict(state)
        assert (collector.next() == second).all()


def test_an_evaluation_reports_the_mean_of_the_components():
    with Evaluator(Miner, act, num_trajectories=3, num_envs=2) as evaluator:
        assert evaluator.evaluate()["eval/reward"] == -4.5


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_space_of_one_number_changes_nothing(shape):
    class Plain(Miner):
        reward_space = spaces.Box(-9, 9, shape)

        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, reward[:1].reshape(shape), *rest

    with Collector(Plain(), act, frames_per_batch=3) as collector:
        assert collector.next()["next", "reward"].tolist() == [[1.0]] * 3
        assert collector.stats()["env_path"] == "array"


class Summed(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward.sum()


class Stepping(gymnasium.Wrapper):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, float(reward.sum()), *rest


class Passing(gymnasium.Wrapper):
    reward_space = Miner.reward_space

    def step(self, action):
        return super().step(action)


@pytest.mark.parametrize(
    ("wrap", "rewards"),
    [
        (Summed, [-1.0, -3.0, -5.0]),
        (lambda env: TimeLimit(Stepping(env), 9), [-1.0, -3.0, -5.0]),
        (lambda env: TimeLimit(env, 3), [1.0, -2.0, 1.0, -4.0, 1.0, -6.0]),
        (Passing, [1.0, -2.0, 1.0, -4.0, 1.0, -6.0]),
    ],
)
def test_a_wrapper_may_pass_them_on_or_make_one_number_of_them(wrap, rewards):
    with Collector(wrap(Miner()), act, frames_per_batch=3) as collector:
        assert collector.next()["next", "reward"].flatten().tolist() == rewards


class Wrong(Miner):
    reward_space = spaces.Box(-9, 9, (3,))


class Silent(Miner):
    reward_space = None


class Uncountable(Miner):
    def step(self, action):
        return super().step(action)[0], "much", False, False, {}


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (Wrong, ValueError, r"reward of shape \(2,\), but its reward_space says \(3,\)"),
        (Silent, ValueError, r"must be a single number: .* state reward_space = .*Box.*\(2,\)"),
        (partial(ParallelEnv, 1, Wrong), ValueError, r"space says \(3,\)"),
        (Uncountable, TypeError, "reward='much', but it must have numbers"),
        (partial(ParallelEnv, 1, Uncountable), TypeError, "reward='much', but it must have numb"),
    ],
)
def test_what_does_not_fit_is_named(make, error, match):
    def collect():
        with Collector(make, act, frames_per_batch=3) as collector:
            collector.next()

    with pytest.raises(error, match=match):
        collect()


def test_the_spec_has_the_shape():
    env = GymEnv(Miner())
    assert env.reward_spec.shape == env.rollout(2)["next", "reward"].shape[1:] == (2,)
