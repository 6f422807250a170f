"""Observations and rewards that one process normalises."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

from tests.oracle.continuing import saved
from trawl.collectors import Collector, Normalization, NormalizeObservation, NormalizeReward
from trawl.envs import GymEnv


class Walk(gymnasium.Env):
    """Random steps away from 100, in episodes of random length; actions change nothing."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2) * (1, 5) + 100
        return self.place.astype(np.float32), {}

    def step(self, action):
        self.place = self.place + self.np_random.normal(size=2)
        ended = bool(self.np_random.random() < 0.1)
        return self.place.astype(np.float32), float(self.place[0] - 99), ended, False, {}


def policy():
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(2, 1), ["observation"], ["action"])


def scaled(values, mean, var, clip=10.0):
    return np.clip((values - mean) / np.sqrt(var + 1e-8), -clip, clip)


def normalizing(source=Walk, policy=None, **options):
    options = {"frames_per_batch": 50, "normalize_observations": True, **options}
    return Collector(source, policy, **options)


def test_a_seed_in_the_middle_normalises_the_first_observation():
    """Also that of a collector which loads the state after the seed."""
    with normalizing(Walk, policy()) as collector, normalizing(Walk, policy()) as other:
        collector.set_seed(0)
        collector.next()
        own = collector.normalization.observations["observation"]
        collector.set_seed(1)
        other.load_state_dict(collector.state_dict())
        batch = collector.next()
        assert (other.next() == batch).all()
    with Collector(Walk, policy(), frames_per_batch=50) as other:
        other.set_seed(1)
        raw = other.next()["observation"][0].numpy()
    first = batch["observation"][0].numpy()
    np.testing.assert_allclose(first, scaled(raw, own.mean, own.var), rtol=1e-3, atol=1e-3)


def test_states_of_other_statistics_are_refused():
    rewards = {"normalize_observations": False, "normalize_rewards": True}
    with (
        Collector(Walk, frames_per_batch=50) as plain,
        normalizing() as other,
        normalizing(**rewards) as third,
    ):
        for one in (plain, other, third):
            one.next()
        states = [one.state_dict() for one in (plain, other, third)]
        with pytest.raises(KeyError, match=r"no 'normalization'.*without normalize_observations"):
            other.load_state_dict(states[0])
        with pytest.raises(ValueError, match="normalises"):
            other.load_state_dict(states[2])
        with pytest.raises(ValueError, match="with the same normalize_observations"):
            plain.load_state_dict(states[1])


class Pair(gymnasium.Env):
    """A dictionary of numbers, images and a choice."""

    observation_space = spaces.Dict(
        a=spaces.Box(-1, 1, (2,), np.float64),
        image=spaces.Box(0, 255, (2, 2), np.uint8),
        inner=spaces.Dict(b=spaces.Box(-1, 1, (), np.float32)),
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(0)
        return self.observation_space.sample(), {"value": np.float32(3)}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {"value": np.float32(3)}


def test_all_floating_point_observations_are_normalised():
    env = GymEnv(Pair(), info_keys=["value"])
    with normalizing(env, frames_per_batch=100) as collector:
        batch = [collector.next() for _ in range(2)][-1]
        found = collector.normalization.observations
    assert set(found) == {"a", ("inner", "b")}
    assert found["inner", "b"].mean.shape == (1,)
    assert batch["a"].dtype == torch.float64
    assert abs(float(batch["a"].std()) - 1) < 0.2
    assert batch["image"].dtype == torch.uint8
    assert (batch["info", "value"] == 3).all()


def test_the_statistics_normalise_other_observations():
    """Also without a collector, from their state."""
    chosen = NormalizeObservation(keys=["observation", ("observation",)], clip=2.0)
    # A key that is named twice counts once.
    assert chosen.keys == (("observation",),)
    with normalizing(normalize_observations=chosen, normalize_rewards=True) as collector:
        collector.next()
        found = collector.normalization
        other = Normalization.from_state(saved(found.state_dict()))
    values = torch.tensor([[100.0, 90.0]])
    assert other.options == found.options
    assert torch.equal(found.normalize_observation(values), other.normalize_observation(values))
    assert other.rewards["reward"].count == found.observations["observation"].count == 50
    with pytest.raises(ValueError, match=r"must be one that .* has no 'training'"):
        Normalization.from_state({"weight": torch.zeros(3)})
    own = found.observations["observation"]
    np.testing.assert_allclose(
        found.normalize_observation(values),
        scaled(values.numpy(), own.mean, own.var, 2.0),
        rtol=1e-5,
        atol=1e-5,
    )
    assert values.tolist() == [[100, 90]]
    with pytest.raises(KeyError, match="'other' is not normalised"):
        found.normalize_observation(values, "other")
    assert "observation" in repr(found)
    assert isinstance(found, Normalization)


# --- errors


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (NormalizeObservation, {"clip": 0}, "clip must be a number above 0, but it is 0"),
        (NormalizeObservation, {"epsilon": -1.0}, "epsilon must be a number above 0"),
        (NormalizeObservation, {"keys": []}, "keys must name at least one"),
        (NormalizeReward, {"gamma": 1.5}, "gamma must be a number from 0 to 1, but it is 1.5"),
        (NormalizeReward, {"clip": "10"}, "clip must be a number above 0, but it is '10'"),
    ],
)
def test_bad_options_are_refused(kind, options, text):
    with pytest.raises(ValueError, match=text):
        kind(**options)


def test_numbers_of_numpy_are_numbers():
    assert NormalizeObservation(clip=np.int64(5), epsilon=np.float32(0.5)).clip == 5
    assert type(NormalizeReward(gamma=np.float32(0.5)).gamma) is float


KEYS = {name: NormalizeObservation(keys=name) for name in ("x", "image")}
NUMBERS = r"floating-point numbers, .* only 'observation' \(torch.int64\)\. .*DtypeObservation"


@pytest.mark.parametrize(
    ("source", "name", "value", "error", "text"),
    [
        (Walk, "observations", 3, TypeError, "True, False or a NormalizeObservation"),
        (Walk, "rewards", NormalizeObservation(), TypeError, "NormalizeReward"),
        (Pair, "observations", KEYS["x"], KeyError, "the key 'x', but the observations are"),
        (Pair, "observations", KEYS["image"], ValueError, "'image', but its dtype is torch.uint8"),
        ("FrozenLake-v1", "observations", True, ValueError, NUMBERS),
    ],
)
def test_mistakes_are_named(source, name, value, error, text):
    with pytest.raises(error, match=text):
        Collector(source, frames_per_batch=10, **{f"normalize_{name}": value})


def test_an_environment_of_torchrl_is_normalised_without_its_counters():
    from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv
    from torchrl.envs import GymEnv as TorchRLGymEnv

    env = TransformedEnv(TorchRLGymEnv("Pendulum-v1"), Compose(StepCounter(), RewardSum()))
    keep = NormalizeReward(keep_raw=True)
    with normalizing(env, normalize_rewards=keep) as collector:
        batches = [collector.next() for _ in range(3)]
        assert list(collector.normalization.observations) == ["observation"]
    for found in batches:
        # The sum of the environment's own rewards.
        raw = found["next", "raw_reward"]
        assert torch.allclose(found["next", "episode_reward"] - found["episode_reward"], raw, 1e-3)
