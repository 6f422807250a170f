"""Methods and attributes of environments are reached by name and by path, wherever they run."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch

from agents import Walkers
from trawl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from trawl.envs import GymEnv, ParallelEnv, PettingZooEnv, SerialEnv
from trawl.errors import WorkerError


class Level(gymnasium.Env):
    """Environment whose reward is its level."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fails_at=None):
        self.level, self.fails_at, self.opponent = 0, fails_at, torch.nn.Linear(1, 1)
        self.lock, self.steps = (step for step in ()), 0

    def set_level(self, level, *, plus=0):
        self.level = level + plus
        return self.level

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, "f4"), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.fails_at:
            raise ZeroDivisionError("at the edge")
        return np.zeros(1, "f4"), float(self.level), False, False, {}


def wrapped():
    return gymnasium.wrappers.TimeLimit(Level(), 20)


def act(observation):
    return torch.nn.functional.one_hot(torch.zeros(observation.shape[:-1], dtype=torch.long), 2)


PLACES = {
    "serial": (SerialEnv, {}),
    "processes": (ParallelEnv, {}),
    "two in each": (ParallelEnv, {"envs_per_worker": 2}),
    "threads": (ParallelEnv, {"backend": "thread"}),
}


@pytest.fixture(scope="module")
def batches():
    """Batches of three environments in each place."""
    made = [cls(3, wrapped, **options) for cls, options in PLACES.values()]
    yield made
    for env in made:
        env.close(raise_if_closed=False)


# --- by name


def test_methods_are_called(batches):
    for batch in batches:
        assert batch.call("set_level", 2) == (2, 2, 2)
        assert batch.call("set_level", 3, indices=[2, 0], plus=4) == (7, 7)
        assert batch.get_attr("level") == (7, 2, 7)
        assert batch.call("level", indices=np.int64(1)) == (2,)
        assert batch.rollout(2)["next", "reward"][:, 0, 0].tolist() == [7.0, 2.0, 7.0]
        for index in (1, np.int64(1), np.array(1), torch.tensor(1)):
            assert batch.get_attr("level", index) == (2,)


def test_attributes_are_set_where_they_are(batches):
    for batch in batches:
        batch.set_attr("level", [1, 2, 3])
        batch.set_attr("level", 9, indices=1)
        batch.set_attr("opponent.training", False)
        assert batch.get_attr("level") == batch.get_attr("unwrapped.level") == (1, 9, 3)
        assert batch.get_attr("_max_episode_steps", [0]) == (20,)
        assert batch.get_attr("opponent.training") == (False,) * 3
        assert [one.in_features for one in batch.get_attr("opponent")] == [1] * 3


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda env: env.call("set_lvl", 1), AttributeError, "what it wraps has an .* 'set_lvl'"),
        (lambda env: env.get_attr("lvl"), AttributeError, "an attribute 'lvl'"),
        (lambda env: env.set_attr("lvl", 1), AttributeError, "an attribute 'lvl'"),
        (lambda env: env.set_attr("opponent.lvl", 1), AttributeError, "an attribute 'lvl'"),
        (lambda env: env.call("level", 1), ValueError, "'level' is int, which can't be called"),
        (lambda env: env.call("level", indices=3), IndexError, "indices has 3, .* from 0 to 2"),
        (lambda env: env.call("level", indices=[-1]), IndexError, "indices has -1"),
        (lambda env: env.call("level", indices=[0, 0]), ValueError, "indices has 0 twice"),
        (lambda env: env.get_attr("level", "0"), TypeError, "indices .* '0'"),
        (lambda env: env.get_attr("level", [True]), TypeError, "indices .* has True"),
        (lambda env: env.set_attr("level", [1, 2]), ValueError, "values has 2 entries, .* 3 env"),
        (lambda env: env.set_attr("level", (1,), [0, 1]), ValueError, "values has 1 entries"),
        (lambda env: env.call("reset"), ValueError, "call.'reset'. would disturb"),
        (lambda env: env.call("unwrapped.step", 0), ValueError, "call.*step.* would disturb"),
        (lambda env: env.call(3), TypeError, "name must be the name"),
        (lambda env: env.get_attr(""), ValueError, "name must begin with"),
    ],
)
def test_wrong_calls_are_named_and_do_no_harm(batches, call, kind, match):
    for batch in batches:
        batch.set_attr("level", 5)
        with pytest.raises(kind, match=match):
            call(batch)
        assert batch.get_attr("level") == (5, 5, 5)


def test_what_cannot_be_sent_is_named():
    env = ParallelEnv(1, Level)
    with pytest.raises(TypeError, match="the result, generator, can't be sent"):
        env.get_attr("lock")
    with pytest.raises(TypeError, match="arguments can't be sent to the environments' processes"):
        env.call("set_level", (step for step in ()))
    assert env.call("set_level", 2) == (2,)
    with pytest.raises(AttributeError, match=r"get_distant_attr\('env.envs\[0\].level'\)"):
        _ = env.envs[0].level
    env.close()


def test_environments_of_other_kinds():
    torchrl = pytest.importorskip("torchrl.envs")
    cases = [
        (lambda: PettingZooEnv(Walkers()), "late", False),
        (lambda: torchrl.GymEnv("CartPole-v1"), "gravity", 1.5),
        (lambda: gymnasium.make_vec("CartPole-v1", 2), "metadata", {"autoreset_mode": "new"}),
        (lambda: SerialEnv(2, Level), "batch_size", None),
    ]
    for make, name, value in cases:
        for cls in (SerialEnv, partial(ParallelEnv, backend="thread")):
            env = cls(2, make)
            before = env.get_attr(name)
            if value is not None:
                env.set_attr(name, value)
                assert env.get_attr(name) == (value, value) != before
            env.close()


# --- by path


@pytest.mark.parametrize("place", ["serial", "two in each"])
def test_paths_lead_into_environments(place):
    cls, options = PLACES[place]
    with Collector(cls(2, wrapped, **options), act, frames_per_batch=8) as collector:
        collector.next()
        for call, kind, match in [
            (lambda c: c.get_distant_attr("env.envs[0].unwrapped.lvl"), AttributeError, "'lvl'"),
            (lambda c: c.get_distant_attr("env.envs[2].unwrapped.level"), IndexError, "of range"),
            (lambda c: c.get_distant_attr("env.envs[0]..level"), ValueError, "malformed"),
            (lambda c: c.map_fn("env.envs[0].unwrapped.level"), AttributeError, "can't be called"),
            (lambda c: c.cascade_execute("env.envs[0].unwrapped.level", 2), ValueError, "argumen"),
        ]:
            with pytest.raises(kind, match=match):
                call(collector)
        assert collector.next()["next", "reward"].unique().tolist() == [0.0]
        assert collector.map_fn("env.envs[0].unwrapped.set_level", [(5,), (6,)]) == [5, 6]
        assert collector.cascade_execute("env.envs[1].env.unwrapped.set_level", 2, plus=1) == 3
        assert collector.cascade_execute("env.call", "set_level", 4, indices=1) == (4,)
        assert collector.get_distant_attr("env.envs[1].unwrapped.level") == 4
        assert collector.getattr_env("envs[0].unwrapped.level") == 6
        assert collector.next()["next", "reward"].unique().tolist() == [4.0, 6.0]


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_paths_lead_into_environments_of_workers(cls):
    make = [lambda: ParallelEnv(2, wrapped), lambda: SerialEnv(2, wrapped)]
    with cls(make, act, frames_per_batch=8, start_method="inline") as collector:
        collector.next()
        path = "env.envs[0].unwrapped"
        assert collector.map_fn(f"{path}.set_level", [(5,), (6,)]) == [5, 6]
        assert collector.cascade_execute(f"{path}.set_level", 2, plus=1) == [3, 3]
        assert collector.cascade_execute("env.call", "set_level", 4, indices=1) == [(4,)] * 2
        assert collector.get_distant_attr(f"{path}.level") == [3, 3]
        assert collector.cascade_execute("env.get_attr", "level") == [(3, 4)] * 2
        with pytest.raises(AttributeError, match="'lvl'"):
            collector.cascade_execute("env.get_attr", "lvl")
        # Batches that were finished before the calls come first.
        while collector.next()["next", "reward"].unique().tolist() != [3.0, 4.0]:
            pass


# --- while environments are stepping


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_calls_between_batches_of_first_ready_environments(backend):
    options = {"frames_per_batch": 5, "env_backend": backend}
    with AsyncBatchedCollector([wrapped] * 3, policy=act, **options) as collector:
        for level in range(1, 5):
            collector.next()
            collector.env.call("set_level", level)
            assert collector.map_fn("env.envs[1].unwrapped.set_level", [(level,)]) == [level]
            assert collector.get_distant_attr("env.envs[2].unwrapped.level") == level
        while collector.next()["next", "reward"].unique().tolist() != [4.0]:
            pass


@pytest.mark.parametrize("fails_at", [3, 4])
def test_a_step_that_fails_during_a_call_is_told_by_the_next_batch(fails_at):
    make = [lambda: Level(fails_at), Level]
    with AsyncBatchedCollector(make, policy=act, frames_per_batch=2) as collector:

        def collect():
            while True:
                collector.next()
                collector.env.call("set_level", 1)

        with pytest.raises(ZeroDivisionError, match="at the edge") as caught:
            collect()
        assert isinstance(caught.value, WorkerError)


def test_a_model_in_another_process_has_no_weights_to_receive():
    with (
        Collector(ParallelEnv(1, Level), act, frames_per_batch=2) as collector,
        pytest.raises(ValueError, match=r"'env.envs\[0\].unwrapped.opponent' is in another proc"),
    ):
        collector.get_model("env.envs[0].unwrapped.opponent")


def test_unwrapped_is_the_simulator():
    assert type(GymEnv(wrapped()).unwrapped) is Level
    assert SerialEnv(1, Level).unwrapped.batch_size == (1,)
