"""Policies that return odd things: what is clear works, and the rest is named in the error."""

import bdb

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from trawl.collectors import Collector, MultiSyncCollector
from trawl.envs import GymEnv
from trawl.testing import NumberedEnv


def carts():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


@pytest.mark.parametrize("value", [1, np.int64(1), np.array(1), torch.tensor(1)], ids=repr)
@pytest.mark.parametrize("as_module", [False, True])
def test_a_number_is_an_action(value, as_module):
    def policy(observation):
        return value

    given = TensorDictModule(policy, ["observation"], ["action"]) if as_module else policy
    with Collector(carts, given, frames_per_batch=4) as collector:
        action = collector.next()["action"]
    assert action.dtype is torch.int64
    assert action.tolist() == [1] * 4


@pytest.mark.parametrize("value", [[0.5], np.array([0.5], np.float32)], ids=repr)
def test_so_are_lists_and_arrays(value):
    with Collector("Pendulum-v1", lambda observation: value, frames_per_batch=4) as collector:
        assert collector.next()["action"].tolist() == [[0.5]] * 4


def test_and_beside_other_outputs():
    def policy(observation):
        return 1, 0.25

    with Collector(carts, policy, frames_per_batch=4) as collector:
        batch = collector.next()
    assert batch["action"].tolist() == [1] * 4
    assert batch["output1"].tolist() == [0.25] * 4


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_nan_action_is_named(lanes):
    def policy(observation):
        calls.append(None)
        action = torch.zeros(*observation.shape[:-1], 1)
        if len(calls) == 5:
            action.view(-1)[-1] = torch.nan
        return action

    calls = []
    where = " of environment 1" if lanes == 2 else ""
    env = ["Pendulum-v1"] * lanes if lanes == 2 else "Pendulum-v1"
    expected = rf"policy wrote nan to 'action'{where} at step 2 of this batch, and the reward"
    with pytest.raises(ValueError, match=expected):
        Collector(env, policy, frames_per_batch=8 * lanes).next()


def test_it_is_named_on_torchrl_s_environments():
    torchrl_envs = pytest.importorskip("torchrl.envs")

    def policy(observation):
        return torch.full((*observation.shape[:-1], 1), torch.nan)

    env = torchrl_envs.SerialEnv(2, lambda: torchrl_envs.GymEnv("Pendulum-v1"))
    with pytest.raises(ValueError, match="policy wrote nan to 'action' of environment 0 at step 0"):
        Collector(env, policy, frames_per_batch=8).next()


def test_texts_reach_a_policy_as_strings():
    import gymnasium

    class Words(gymnasium.Env):
        observation_space = gymnasium.spaces.Text(8)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return "first", {}

        def step(self, action):
            return "later", 1.0, False, False, {}

    def one(observation):
        seen.append(type(observation))
        return torch.tensor([1, 0])

    def both(observation):
        seen.extend(map(type, observation))
        return torch.tensor([[1, 0], [1, 0]])

    for env, policy in ((Words(), one), ([Words, Words], both)):
        seen = []
        Collector(env, policy, frames_per_batch=4).next()
        assert set(seen) == {str}


def test_a_debugger_in_a_worker_says_where_it_works():
    class Halting(NumberedEnv):
        def step(self, action):
            raise bdb.BdbQuit

    collector = MultiSyncCollector([Halting], frames_per_batch=4)
    with pytest.raises(bdb.BdbQuit, match=r'BdbQuit\. A debugger .* start_method="inline"'):
        collector.next()


def test_a_class_is_no_policy():
    with pytest.raises(TypeError, match=r"policy must be an object, but it is the class Lin\w+:"):
        Collector("Pendulum-v1", torch.nn.Linear, frames_per_batch=4)


def test_the_environment_comes_before_the_policy():
    with pytest.raises(TypeError, match="it is a module, Linear: the environment comes first"):
        Collector(torch.nn.Linear(3, 1), "Pendulum-v1", frames_per_batch=4)


def test_the_environments_of_workers_come_before_the_policy():
    with pytest.raises(TypeError, match="it is a module, Linear: the environment comes first"):
        MultiSyncCollector(torch.nn.Linear(3, 1), ["Pendulum-v1"] * 2, frames_per_batch=4)


def test_an_index_out_of_range_need_not_be_encoded():
    with (
        pytest.raises(ValueError, match="requires an index in the valid range") as raised,
        Collector(carts, lambda observation: torch.tensor(2), frames_per_batch=4) as collector,
    ):
        collector.next()
    assert "one_hot" not in str(raised.value)
