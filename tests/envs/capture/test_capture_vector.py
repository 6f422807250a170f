"""The state of vector environments, captured by their parts."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers
from test_capture import Constructed

from tests.oracle.continuing import Pickled, Walk, saved
from trawl import Collector
from trawl.envs.capture import capture, restore, ways_of
from trawl.errors import EnvStateError
from trawl.testing import NestedEnv, NumberedEnv, RaggedEnv, SelfResettingVectorEnv

MODES = sorted(mode.value for mode in AutoresetMode)
NAMES = ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "Blackjack-v1", "FrozenLake-v1"]


class Numpy(VectorEnv):
    """A vector environment of arrays, which resets in the step after an episode."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - as Gymnasium

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(-np.inf, np.inf, (num_envs, 2), np.float64)
        self.action_space = spaces.MultiDiscrete([2] * num_envs)
        self.places = np.zeros((2, num_envs))
        self.ended = np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.places[:] = self.np_random.normal(size=self.places.shape)
        self.ended[:] = False
        return self.places.T.copy(), {}

    def step(self, actions):
        self.places += self.np_random.normal(size=self.places.shape) + actions
        self.places[:, self.ended] = 0
        rewards = np.where(self.ended, 0.0, self.places[0])
        self.ended = ~self.ended & (self.np_random.random(self.num_envs) < 0.2)
        return self.places.T.copy(), rewards, self.ended.copy(), np.zeros_like(self.ended), {}


class Holder(VectorEnv):
    """A vector environment with a list of environments, which it steps itself."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium

    def __init__(self, count):
        self.num_envs = count
        self.walks = [gymnasium.make("Pendulum-v1", max_episode_steps=5 + i) for i in range(count)]
        self.single_observation_space = self.walks[0].observation_space
        self.single_action_space = self.walks[0].action_space
        self.observation_space = spaces.Box(-np.inf, np.inf, (count, 3), np.float32)
        self.action_space = spaces.Box(-2, 2, (count, 1), np.float32)

    def reset(self, *, seed=None, options=None):
        seeds = [seed + i for i in range(self.num_envs)]
        found = [env.reset(seed=seed)[0] for env, seed in zip(self.walks, seeds, strict=True)]
        return np.stack(found), {}

    def step(self, actions):
        *results, _ = zip(
            *(env.step(a) for env, a in zip(self.walks, actions, strict=True)), strict=True
        )
        obs, rewards, terminated, truncated = map(np.stack, results)
        for index in np.flatnonzero(terminated | truncated):
            obs[index], _ = self.walks[index].reset()
        return obs, rewards, terminated, truncated, {}


def wrapped(env):
    if env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP:
        env = wrappers.NormalizeObservation(env)
    env = wrappers.NormalizeReward(env)
    return wrappers.RecordEpisodeStatistics(
        wrappers.TransformReward(env, lambda reward: 2 * reward)
    )


def flat(value):
    if isinstance(value, dict):
        return [flat(value[key]) for key in sorted(value)]
    if isinstance(value, (tuple, list)):
        return [flat(part) for part in value]
    return value if isinstance(value, (str, type(None))) else np.asarray(value).tobytes()


def drive(env, actions, mode):
    """Steps, and resets in the mode ``"Disabled"``; returns all results."""
    found = []
    for action in actions:
        obs, rewards, terminated, truncated, _ = env.step(action)
        found.append(flat([obs, rewards, terminated, truncated]))
        ended = terminated | truncated
        if mode == "Disabled" and ended.any():
            found.append(flat(env.reset(options={"reset_mask": ended})[0]))
    return found


def check(make, steps, mode=None, later=60):
    """Compares an environment with one that continues from its state; returns the way."""
    env, other = make(), make()
    env.reset(seed=1)
    env.action_space.seed(steps)
    actions = [env.action_space.sample() for _ in range(steps + later)]
    drive(env, actions[:steps], mode)
    other.reset(seed=2)
    state = capture(env)
    other = restore(other, saved(state))
    assert drive(env, actions[steps:], mode) == drive(other, actions[steps:], mode)
    env.close(), other.close()
    return state["way"]


def sync(mode, count, make):
    return SyncVectorEnv([make] * count, autoreset_mode=AutoresetMode(mode))


class Pole(gymnasium.Wrapper):
    """A CartPole with a set, which only a pickle holds."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.found = {1}


# Each kind in each mode, with another number of steps and of environments.
SUB_ENVIRONMENTS = [*map(partial(partial, gymnasium.make), NAMES), NumberedEnv, NestedEnv]
SUB_ENVIRONMENTS += [RaggedEnv, Walk, Pickled, Pole]


@pytest.mark.parametrize("mode", MODES)
def test_sub_environments_continue_to_the_bit(mode):
    for number, kind in enumerate(SUB_ENVIRONMENTS):
        make = partial(sync, mode, 1 + number % 3, kind)
        assert check(make, 7 * number % 40, mode) == "parts"


@pytest.mark.parametrize(
    "make",
    [
        partial(Numpy, 3),
        partial(gymnasium.make_vec, "CartPole-v1", 2, vectorization_mode="vector_entry_point"),
        partial(Holder, 2),
        partial(SelfResettingVectorEnv, [partial(NumberedEnv, lengths=[3, 1, 4])] * 2),
    ],
    ids=["numpy", "CartPole", "list", "testing"],
)
def test_custom_vector_environments(make):
    for steps in (0, 35):
        assert check(make, steps) == "attributes"
        assert check(lambda: wrapped(make()), steps) == "attributes"


def test_the_ways_of_sub_environments_are_told():
    makes = [partial(gymnasium.make, "CartPole-v1"), Pole]
    env = wrapped(SyncVectorEnv(makes))
    env.reset(seed=1)
    assert ways_of(env) == ["attributes", "pickle"]
    assert ways_of(Numpy(2)) == ["attributes"] * 2


# --- what is not captured, or doesn't fit


def test_an_error_names_the_sub_environment():
    env = SyncVectorEnv([Walk, Constructed])
    env.reset(seed=1)
    with pytest.raises(EnvStateError, match="parts: sub-environment 1: the state of"):
        capture(env)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (partial(SyncVectorEnv, [Walk] * 3), "number of environments is 2"),
        (partial(Numpy, 2), "wrapper chain is .*SyncVectorEnv"),
    ],
    ids=["number", "kind"],
)
def test_the_state_of_another_vector_environment_is_refused(other, what):
    env, other = SyncVectorEnv([Walk, Walk]), other()
    env.reset(seed=1)
    with pytest.raises(EnvStateError, match=f"one of another environment: its {what}"):
        restore(other, capture(env))


def test_nothing_is_changed_if_one_sub_environment_differs():
    def made(second):
        return SyncVectorEnv([partial(gymnasium.make, "Pendulum-v1"), second])

    env = made(partial(gymnasium.make, "Pendulum-v1", g=3))
    other = made(partial(gymnasium.make, "Pendulum-v1"))
    env.reset(seed=1), other.reset(seed=2)
    before = capture(other)
    with pytest.raises(EnvStateError, match="its arguments is g=3"):
        restore(other, capture(env))
    assert capture(other) == before


class Halving(Numpy):
    """Returns observations of half the size from resets."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return obs.astype(np.float32), info


def test_resets_and_steps_may_return_floats_of_different_sizes():
    one, other = (Collector(Halving(2), frames_per_batch=8) for _ in range(2))
    with one, other:
        one.set_seed(3)
        one.next()
        other.load_state_dict(one.state_dict())
        first, second = one.next(), other.next()
    assert torch.equal(first["observation"], second["observation"])
    assert first["observation"].dtype == torch.float64
