"""Observations and rewards that one process normalises."""

import io

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import (
    Collector,
    Normalization,
    NormalizeObservation,
    NormalizeReward,
)
from trawl.envs import FrameStack, GymEnv

MASK = ("collector", "mask")
NEXT = ("next", "observation")


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


def test_a_frozen_normalisation_keeps_its_statistics():
    with Collector(Walk, frames_per_batch=50, normalize_observations=True) as collector:
        collector.set_seed(0)
        collector.next()
        found = collector.normalization
        before = found.observations["observation"]
        found.training = False
        batch = collector.next()
        assert found.observations["observation"] is before
        found.training = True
        collector.next()
        assert found.observations["observation"].count == 100
    assert batch["observation"].abs().max() < 10


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "given"])
def test_two_equally_seeded_collectors_are_equal(seeded):
    first = []
    for _ in range(2):
        with Collector(Walk, policy(), frames_per_batch=50, normalize_observations=True) as one:
            if not seeded:
                one.reset(seed=3)
            one.set_seed(3)
            first.append(one.next())
    assert (first[0] == first[1]).all()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Replayed(Walk):
    """Its state has a generator, so that its actions are logged and replayed."""

    def reset(self, **kwargs):
        self.numbers = (number for number in range(1000))
        return super().reset(**kwargs)

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward + next(self.numbers), *rest


def test_an_environment_that_is_replayed_resumes_to_the_bit():
    options = {"frames_per_batch": 60, "normalize_observations": True, "normalize_rewards": True}
    with Collector(Replayed, policy(), **options) as one:
        one.set_seed(0)
        one.next()
        assert one.env_state_methods() == ["replay"]
        state = one.state_dict()
        expected = one.next()
    with Collector(Replayed, policy(), **options) as other:
        other.load_state_dict(state)
        assert (other.next() == expected).all()


def test_a_state_right_after_a_seed_resumes_to_the_bit():
    with Collector(Walk, policy(), frames_per_batch=60, normalize_observations=True) as one:
        one.set_seed(0)
        one.next()
        one.set_seed(1)
        state = one.state_dict()
        expected = one.next()
    with Collector(Walk, policy(), frames_per_batch=60, normalize_observations=True) as other:
        other.load_state_dict(state)
        assert (other.next() == expected).all()


def test_a_state_without_statistics_is_refused():
    with (
        Collector(Walk, frames_per_batch=10) as one,
        Collector(Walk, frames_per_batch=10, normalize_observations=True) as other,
        Collector(Walk, frames_per_batch=10, normalize_rewards=True) as third,
    ):
        with pytest.raises(KeyError, match="no 'normalization'"):
            other.load_state_dict(one.state_dict())
        with pytest.raises(ValueError, match="normalises"):
            other.load_state_dict(third.state_dict())


def test_single_steps_are_normalised_for_a_buffer():
    rows = []

    class Buffer:
        def add(self, frame):
            rows.append(frame.clone())

    with Collector(
        Walk,
        frames_per_batch=30,
        total_frames=60,
        replay_buffer=Buffer(),
        extend_buffer=False,
        normalize_observations=True,
    ) as collector:
        for _ in collector:
            pass
        assert collector.normalization.observations["observation"].count == 60
    assert len(rows) == 60
    assert rows[-1]["observation"].abs().max() < 10


def test_a_seed_in_the_middle_normalises_the_first_observation():
    with Collector(Walk, policy(), frames_per_batch=50, normalize_observations=True) as collector:
        collector.set_seed(0)
        collector.next()
        own = collector.normalization.observations["observation"]
        collector.set_seed(1)
        first = collector.next()["observation"][0].numpy()
    with Collector(Walk, policy(), frames_per_batch=50) as other:
        other.set_seed(1)
        raw = other.next()["observation"][0].numpy()
    np.testing.assert_allclose(first, scaled(raw, own.mean, own.var), rtol=1e-3, atol=1e-3)


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
    with Collector(env, frames_per_batch=100, normalize_observations=True) as collector:
        batch = [collector.next() for _ in range(2)][-1]
        found = collector.normalization.observations
    assert set(found) == {"a", ("inner", "b")}
    assert found["inner", "b"].mean.shape == (1,)
    assert batch["a"].dtype == torch.float64
    assert abs(float(batch["a"].std()) - 1) < 0.2
    assert batch["image"].dtype == torch.uint8
    assert (batch["info", "value"] == 3).all()


def test_keys_choose_observations():
    chosen = NormalizeObservation(keys=[("inner", "b")], clip=0.5)
    with Collector(Pair, frames_per_batch=50, normalize_observations=chosen) as collector:
        batch = [collector.next() for _ in range(2)][-1]
        assert list(collector.normalization.observations) == [("inner", "b")]
    assert batch["inner", "b"].abs().max() == 0.5
    assert batch["a"].abs().max() <= 1


def test_the_statistics_normalise_other_observations():
    with Collector(Walk, frames_per_batch=64, normalize_observations=True) as collector:
        collector.next()
        found = collector.normalization
    values = torch.tensor([[100.0, 90.0]])
    own = found.observations["observation"]
    np.testing.assert_allclose(
        found.normalize_observation(values),
        scaled(values.numpy(), own.mean, own.var),
        rtol=1e-5,
        atol=1e-5,
    )
    assert values.tolist() == [[100, 90]]
    with pytest.raises(KeyError, match="'other' is not normalised"):
        found.normalize_observation(values, "other")
    assert "observation" in repr(found)
    assert isinstance(found, Normalization)


def test_a_state_normalises_without_a_collector():
    options = NormalizeObservation(keys=["observation"], clip=2.0)
    with Collector(
        Walk, frames_per_batch=64, normalize_observations=options, normalize_rewards=True
    ) as collector:
        collector.next()
        own = collector.normalization
        found = Normalization.from_state(through_a_file(own.state_dict()))
    assert found.options == own.options
    values = torch.tensor([[100.0, 90.0]])
    assert torch.equal(found.normalize_observation(values), own.normalize_observation(values))
    assert found.rewards["reward"].count == 64
    with pytest.raises(ValueError, match=r"must be one that .* has no 'training'"):
        Normalization.from_state({"weight": torch.zeros(3)})


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


@pytest.mark.parametrize(
    ("source", "options", "error", "text"),
    [
        (Walk, {"normalize_observations": 3}, TypeError, "True, False or a NormalizeObservation"),
        (Walk, {"normalize_rewards": NormalizeObservation()}, TypeError, "NormalizeReward"),
        (
            Pair,
            {"normalize_observations": NormalizeObservation(keys=["x"])},
            KeyError,
            "the key 'x', but the observations are",
        ),
        (
            Pair,
            {"normalize_observations": NormalizeObservation(keys="image")},
            ValueError,
            "'image', but its dtype is torch.uint8",
        ),
        ("FrozenLake-v1", {"normalize_observations": True}, ValueError, "floating-point numbers"),
    ],
)
def test_mistakes_are_named(source, options, error, text):
    with pytest.raises(error, match=text):
        Collector(source, frames_per_batch=10, **options)


def test_an_environment_of_torchrl_is_normalised_without_its_counters():
    from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv
    from torchrl.envs import GymEnv as TorchRLGymEnv

    def make():
        env = TorchRLGymEnv("Pendulum-v1")
        return TransformedEnv(env, Compose(StepCounter(), RewardSum()))

    options = {"normalize_observations": True, "normalize_rewards": NormalizeReward(keep_raw=True)}
    with (
        Collector(make, frames_per_batch=50, **options) as collector,
        Collector("Pendulum-v1", frames_per_batch=50, **options) as other,
    ):
        for one in (collector, other):
            one.set_seed(3)
        batches = [(collector.next(), other.next()) for _ in range(3)]
        assert list(collector.normalization.observations) == ["observation"]
        statistics = [one.normalization.observations["observation"] for one in (collector, other)]
    for found, expected in batches:
        # The sum of the environment's own rewards.
        raw = found["next", "raw_reward"]
        assert torch.allclose(found["next", "episode_reward"] - found["episode_reward"], raw, 1e-3)
        assert found["next", "reward"].abs().max() <= 10
        assert found["observation"].shape == expected["observation"].shape
    assert statistics[0].count == statistics[1].count == 150


class Broken(Walk):
    """Returns an infinite observation and reward."""

    def step(self, action):
        return np.array([np.inf, 0], np.float32), np.inf, False, False, {}


@pytest.mark.parametrize("name", ["normalize_observations", "normalize_rewards"])
def test_infinite_values_are_an_error(name):
    with (
        Collector(Broken, frames_per_batch=10, **{name: True}) as collector,
        pytest.raises(ValueError, match="values that are not finite, so it can't be normalised"),
    ):
        collector.next()


# --- other kinds of environments


def test_envpool_is_normalised_also_if_its_environments_come_as_they_are_ready():
    envpool = pytest.importorskip("envpool")

    def made(**options):
        return envpool.make_gymnasium("Pendulum-v1", num_envs=4, seed=0, **options)

    with Collector(made(), frames_per_batch=1000, normalize_observations=True) as collector:
        batches = [collector.next() for _ in range(2)]
        counted = collector.normalization.observations["observation"].count
    assert counted == sum(int(b.get(MASK).sum()) if MASK in b.keys(True) else 1000 for b in batches)
    pool = made(batch_size=2)
    with Collector(pool, frames_per_batch=1000, normalize_observations=True) as collector:
        frames = torch.cat([collector.next() for _ in range(2)])
        assert collector.normalization.observations["observation"].count == 2000
    later = frames["observation"][1000:]
    assert later.mean(0).abs().max() < 0.5
    assert (later.std(0) - 1).abs().max() < 0.5


def test_a_key_that_is_named_twice_counts_once():
    options = NormalizeObservation(keys=["observation", ("observation",)])
    assert options.keys == (("observation",),)
    assert FrameStack(4, keys=["a", "b", ("a",)]).keys == (("a",), ("b",))
    with Collector(Walk, frames_per_batch=50, normalize_observations=options) as collector:
        collector.next()
        assert collector.normalization.observations["observation"].count == 50


class Still(Walk):
    """Observations of half precision that never change."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float16)

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0].astype(np.float16) * 0, {}

    def step(self, action):
        return np.zeros(2, np.float16), 0.0, False, False, {}


@pytest.mark.parametrize("more", [{"epsilon": 1e-12}, {"clip": 1e6}])
def test_half_precision_stays_finite(more):
    options = NormalizeObservation(**more)
    with Collector(Still, frames_per_batch=50, normalize_observations=options) as collector:
        for batch in (collector.next(), collector.next()):
            assert batch["observation"].isfinite().all()
            assert batch[NEXT].isfinite().all()


def test_numbers_of_numpy_are_numbers():
    assert NormalizeObservation(clip=np.int64(5), epsilon=np.float32(0.5)).clip == 5
    options = NormalizeReward(gamma=np.float32(0.5))
    assert type(options.gamma) is float


def test_states_with_and_without_statistics_name_the_options():
    with Collector(Walk, frames_per_batch=10) as plain, normalizing() as other:
        for one in (plain, other):
            one.next()
        states = plain.state_dict(), other.state_dict()
        with pytest.raises(ValueError, match="with the same normalize_observations"):
            plain.load_state_dict(states[1])
        with pytest.raises(KeyError, match="without normalize_observations"):
            other.load_state_dict(states[0])


def normalizing():
    return Collector(Walk, frames_per_batch=10, normalize_observations=True)
