"""What a user passed stays the user's: environments before, during and after their use."""

import random
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import (
    Compose,
    GymEnv,
    GymWrapper,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)

import trawl.envs
from trawl.collectors import Collector, Evaluator, MultiSyncCollector
from trawl.envs.layers import layers_of

ID = "Pendulum-v1"


def transformed(*transforms):
    return TransformedEnv(GymEnv(ID), Compose(*transforms))


def normalising(kind=VecNormV2):
    env = transformed(kind(in_keys=["observation"]), RewardSum())
    env.rollout(4)
    return env


def wrapped():
    env = NormalizeReward(NormalizeObservation(gymnasium.make(ID)))
    env.reset(seed=1)
    env.step(env.action_space.sample())
    return env


ENVS = {
    "TorchRL": lambda: GymEnv(ID),
    "transformed": lambda: transformed(RewardSum()),
    "one transform": lambda: TransformedEnv(GymEnv(ID), RewardSum()),
    "counting": lambda: transformed(StepCounter(), InitTracker()),
    "VecNormV2": normalising,
    "VecNorm": lambda: normalising(partial(VecNorm, new_api=False)),
    "nested": lambda: TransformedEnv(normalising(), RewardSum(), auto_unwrap=False),
    "wrapped": lambda: GymWrapper(wrapped()),
    "batch": lambda: TransformedEnv(SerialEnv(2, lambda: GymEnv(ID)), RewardSum()),
    "batch of normalising": lambda: SerialEnv(2, normalising),
    "Gymnasium": wrapped,
    "Trawl": lambda: trawl.envs.GymEnv(wrapped()),
    "vector": lambda: gymnasium.vector.SyncVectorEnv([wrapped] * 2),
}
pytestmark = pytest.mark.filterwarnings("ignore:This class is to be deprecated")
ON_ENVS = pytest.mark.parametrize("make", [pytest.param(v, id=k) for k, v in ENVS.items()])


def policy():
    return TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])


def frozen_in(layers):
    return [(vars(one).get("frozen"), vars(one).get("_update_running_mean")) for one in layers]


def shape_of(env):
    """Returns what makes an environment: its layers, their order, and its entries."""
    entries = set()
    if hasattr(env, "fake_tensordict"):
        entries = set(env.fake_tensordict().keys(True, True))
    frozen = frozen_in(layers_of(env))
    return [type(one) for one in layers_of(env)], repr(env), entries, frozen


def statistics_of(env):
    """Returns the statistics of wrappers and transforms, and the states of generators."""
    found = []
    for one in layers_of(env):
        for name in ("obs_rms", "return_rms"):
            moments = vars(one).get(name)
            found += [] if moments is None else [moments.mean.tolist(), float(moments.count)]
        if isinstance(one, (VecNorm, VecNormV2)):
            found.append({k: str(v) for k, v in one.state_dict().items()})
        if "_np_random" in vars(one):
            found.append(str(one.np_random.bit_generator.state))
    return found


def globals_drawn():
    return str((torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()))


def counts(env):
    return "step_count" in str(shape_of(env)[2])


def started(env):
    if hasattr(env, "fake_tensordict"):
        env.reset()  # some environments of TorchRL make their parts with the first reset
    return env


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(make, {"max_frames_per_traj": 3} if i % 3 else {}, id=name)
        for i, (name, make) in enumerate(ENVS.items())
    ],
)
def test_collectors_do_not_change_an_environment(make, options):
    env = started(make())
    if options and counts(env):
        options = {"auto_register_policy_transforms": True}
    before = shape_of(env)
    for _ in range(2):
        with Collector(env, policy(), frames_per_batch=8, total_frames=16, **options) as collector:
            assert shape_of(env) == before
            last = list(collector)[-1]
            assert shape_of(env) == before
            assert "max_frames_per_traj" not in options or last["next", "truncated"].any()
            collector.shutdown(close_env=False)
        assert shape_of(env) == before
    if hasattr(env, "rollout"):
        assert env.rollout(30).shape[-1] == 30


def test_the_transforms_around_an_environment_follow_its_own():
    env = normalising()
    with Collector(env, policy(), frames_per_batch=8, max_frames_per_traj=3) as collector:
        assert collector.env.transform[0] is env.transform[0]
        assert collector.getattr_env("transform[1]") is env.transform[1]
        assert [type(one) for one in collector.env.transform] == [VecNormV2, RewardSum, StepCounter]
        state = collector.state_dict()
        assert state["env_state_dict"].keys() == env.state_dict().keys()
        expected = collector.next()
        collector.load_state_dict(state)
        assert torch.equal(collector.next()["observation"], expected["observation"])


@ON_ENVS
def test_failed_constructors_and_evaluators_leave_an_environment_as_it_was(make):
    env = started(make())
    right, wrong = policy(), TensorDictModule(nn.Linear(5, 1), ["observation"], ["action"])
    limit = {} if counts(env) else {"max_frames_per_traj": 4}
    before, layers = (shape_of(env), statistics_of(env), globals_drawn()), layers_of(env)
    for attempt in (
        lambda: Collector(env, wrong, frames_per_batch=8, **limit),
        lambda: Collector(env, right, frames_per_batch=-1),
        lambda: Collector([env, "no such id"], right, frames_per_batch=8),
    ):
        with pytest.raises(Exception):  # noqa: B017, PT011
            attempt()
        assert (shape_of(env), statistics_of(env), globals_drawn()) == before
    evaluator = Evaluator(env, right, num_trajectories=2, max_steps=5)
    assert evaluator.evaluate()["eval/episode_length"] == 5
    assert shape_of(env)[1:3] == before[0][1:3]
    statistics, own = (
        [one for one in found if not isinstance(one, str)]
        for found in (statistics_of(env), before[1])
    )
    assert statistics == own
    evaluator.shutdown()
    assert frozen_in(layers) == before[0][3]


def test_workers_get_copies_of_environments_and_leave_the_originals():
    env = normalising()
    before = shape_of(env), statistics_of(env)
    options = {"frames_per_batch": 8, "max_frames_per_traj": 3}
    with MultiSyncCollector([env], policy(), **options) as collector:
        assert collector.next()["next", "truncated"].any()
    assert (shape_of(env), statistics_of(env)) == before
    assert env.rollout(30).shape[-1] == 30
