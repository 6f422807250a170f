"""What may stand for an environment."""

import gymnasium
import pytest
from gymnasium.vector import SyncVectorEnv

from trawl.envs import GymEnv, SerialEnv
from trawl.envs.batches.serial import build_env
from trawl.envs.build import is_tensordict_env
from trawl.testing import NumberedEnv, RaggedEnv


def vector():
    return SyncVectorEnv([NumberedEnv] * 2)


@pytest.mark.parametrize(
    ("source", "batch_size"),
    [
        ("CartPole-v1", ()),
        (NumberedEnv(), ()),
        (NumberedEnv, ()),
        (lambda: NumberedEnv(), ()),
        (lambda: "CartPole-v1", ()),
        (lambda: GymEnv(NumberedEnv()), ()),
        (gymnasium.make("CartPole-v1"), ()),
        (vector(), (2,)),
        (vector, (2,)),
        (GymEnv("CartPole-v1", num_envs=3), (3,)),
        (["CartPole-v1"] * 2, (2,)),
        ([NumberedEnv(), NumberedEnv, lambda: GymEnv(NumberedEnv())], (3,)),
        ((NumberedEnv, NumberedEnv), (2,)),
        ([vector, vector, vector()], (3, 2)),
        ([RaggedEnv, RaggedEnv], (2,)),
        (SerialEnv(2, NumberedEnv), (2,)),
    ],
)
def test_environments_come_in_many_ways(source, batch_size):
    env = build_env(source)
    assert env.batch_size == batch_size
    assert env.rollout(2).batch_size == (*batch_size, 2)


def test_a_tensordict_environment_stays_as_it_is():
    env = GymEnv(NumberedEnv())
    assert build_env(env) is env
    assert build_env(lambda: env) is env


def test_arguments_reach_what_makes_the_environment():
    assert build_env(NumberedEnv, {"lengths": [2]}).env.lengths == (2,)
    env = build_env("CartPole-v1", {"categorical_action_encoding": True})
    assert env.action_spec.shape == ()


def test_arguments_may_differ_within_a_list():
    env = build_env([NumberedEnv] * 2, [{"number": 4}, {"number": 7}])
    assert [child.env.number for child in env.envs] == [4, 7]
    env = build_env([NumberedEnv] * 2, {"number": 5})
    assert [child.env.number for child in env.envs] == [5, 5]


def test_there_are_as_many_arguments_as_environments():
    with pytest.raises(ValueError, match=r"create_env_kwargs has 1 .* create_env_fn has 2"):
        build_env([NumberedEnv] * 2, [{}])


@pytest.mark.parametrize(
    ("source", "kind"), [(3, TypeError), (lambda: 3, TypeError), ([], ValueError)]
)
def test_errors_name_the_argument_of_the_caller(source, kind):
    with pytest.raises(kind, match=r"^eval_env"):
        build_env(source, name="eval_env")


def test_a_class_is_no_environment_but_makes_one():
    assert not is_tensordict_env(GymEnv)
    assert is_tensordict_env(GymEnv(NumberedEnv()))
