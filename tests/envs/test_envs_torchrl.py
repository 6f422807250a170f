"""TorchRL's environments beside ours, in ours, and in place of ours."""

import pytest
import torch

from trawl.envs import GymEnv, SerialEnv
from trawl.envs.batches.serial import build_env
from trawl.envs.build import is_tensordict_env
from trawl.testing import NumberedEnv

torchrl_envs = pytest.importorskip("torchrl.envs")

STEP = 2


def keys(tensordict):
    return set(tensordict.keys(True, True))


def replay(actions):
    """A policy that takes these actions."""
    remaining = iter(actions)

    def policy(tensordict):
        return tensordict.set("action", next(remaining))

    return policy


@pytest.mark.parametrize("name", ["Pendulum-v1", "CartPole-v1", "MountainCar-v0"])
def test_frames_are_those_of_torchrls_environment(name):
    ours, theirs = GymEnv(name), torchrl_envs.GymEnv(name)
    actions = ours.full_action_spec.rand((20,))["action"]
    frames = []
    for env in (ours, theirs):
        env.set_seed(5)
        if env is ours:
            env.reset()  # TorchRL's does so when it is seeded
        frames.append(env.rollout(20, replay(actions)))
    assert keys(frames[0]) == keys(frames[1])
    for key in keys(frames[0]):
        assert frames[0][key].dtype == frames[1][key].dtype
        assert torch.equal(frames[0][key], frames[1][key]), key


def test_torchrls_environments_may_be_rows():
    env = SerialEnv(2, lambda: torchrl_envs.GymWrapper(NumberedEnv(lengths=[2])))
    frames = env.rollout(5, break_when_any_done=False)
    assert frames.batch_size == (2, 5)
    assert NumberedEnv.numbers(frames)[..., STEP].tolist() == [[0, 1, 0, 1, 0]] * 2


def wrapper():
    return torchrl_envs.GymWrapper(NumberedEnv())


def test_torchrls_environments_are_known_by_their_protocol():
    env = wrapper()
    assert is_tensordict_env(env)
    assert build_env(env) is env
    assert build_env(wrapper).batch_size == ()
    assert build_env(torchrl_envs.GymEnv, {"env_name": "CartPole-v1"}).batch_size == ()


def test_a_list_of_torchrls_environments_is_batched_by_torchrl():
    env = build_env([wrapper, wrapper()])
    assert isinstance(env, torchrl_envs.SerialEnv)
    assert env.batch_size == (2,)
