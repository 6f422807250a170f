"""Resets get arguments that depend on the environment and the episode, wherever they run."""

import os
from functools import cache, partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from agents import Walkers
from trawl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from trawl.envs import ParallelEnv, PettingZooEnv, SerialEnv, TorchVectorEnv
from trawl.testing import NumberedTorchEnv

torchrl = pytest.importorskip("torchrl.envs")


class Level(gymnasium.Env):
    """Environment that observes the level from its options; its episodes have two steps."""

    observation_space = gymnasium.spaces.Box(-1, 99_999, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    level, dies_at, steps = -1, None, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level, self.time = (options or {}).get("level", -1), 0
        return np.full(1, self.level, "f4"), {}

    def step(self, action):
        self.time, self.steps = self.time + 1, self.steps + 1
        if self.steps == self.dies_at:
            os._exit(3)
        if self.steps == -(self.dies_at or 0):
            raise ZeroDivisionError("at the edge")
        return np.full(1, self.level, "f4"), self.np_random.random(), self.time == 2, False, {}


class Greedy(Level):
    def reset(self, *, seed=None, options=None):
        found = super().reset(seed=seed, options=options)
        (options or {}).clear()
        return found


class Mortal(Level):
    def __init__(self, dies_at):
        self.dies_at = dies_at


class Handle(Level):
    """Its state is not plain data, so it is replayed."""

    def __init__(self):
        self.handle = (one for one in ())


class Stubborn(Level):
    """Its state can't be captured in any way."""

    def __init__(self):
        self.handle, self.chance = (one for one in ()), np.random.default_rng(0)
        self.chance.spawn(1)


def level(env, episode):
    return {"options": {"level": 100 * env + episode}}


def act(observation):
    return torch.nn.functional.one_hot(torch.zeros(observation.shape[:-1], dtype=torch.long), 2)


def levels(batch):
    """Returns the levels of each environment in a batch."""
    rows = batch["observation"].reshape(-1, batch.shape[-1])
    return [row.int().tolist() for row in rows]


EXPECTED = [[100 * env + step // 2 for step in range(6)] for env in range(4)]


def torchrl_level():
    return torchrl.GymWrapper(Greedy())


LAYOUTS = {
    "list": (Collector, lambda: [Greedy] * 4),
    "processes": (Collector, lambda: ParallelEnv(4, Greedy, envs_per_worker=2)),
    "groups": (Collector, lambda: ParallelEnv(4, Greedy, groups=2, backend="thread")),
    "workers": (
        partial(MultiSyncCollector, start_method="inline"),
        lambda: [lambda: ParallelEnv(2, Greedy), lambda: SerialEnv(2, Greedy)],
    ),
    "torchrl": (Collector, lambda: [torchrl_level] * 4),
    "torchrl in processes": (Collector, lambda: ParallelEnv(4, torchrl_level)),
}


@cache
def rewards():
    """Returns what is drawn with the seed, in any layout."""
    with Collector([Greedy] * 4, act, frames_per_batch=24, reset_kwargs=level) as collector:
        collector.set_seed(3)
        return collector.next()["next", "reward"].flatten()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_function_decides_each_episode(layout):
    cls, make = LAYOUTS[layout]
    with cls(make(), act, frames_per_batch=24, reset_kwargs=level) as collector:
        assert levels(collector.next()) == EXPECTED
        collector.set_seed(3)
        batch = collector.next()
        assert levels(batch) == EXPECTED
        if "torchrl" not in layout:
            assert torch.equal(batch["next", "reward"].flatten(), rewards())
        again = levels(collector.next())
        assert again == [[one + 3 for one in row] for row in EXPECTED]
        given = {"level": 7}
        collector.reset(options=given)
        # The options of a call take precedence, until the episodes that it began end.
        assert levels(collector.next())[0][:4] == [7, 7, 8, 8]
        assert given == {"level": 7}
    # A mapping is for all, and stays as it is.
    given = {"options": {"level": 5}}
    with cls(make(), act, frames_per_batch=16, reset_kwargs=given) as collector:
        assert levels(collector.next()) == [[5] * 4] * 4
    assert given == {"options": {"level": 5}}


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_environments_at_their_own_pace(backend):
    with AsyncBatchedCollector(
        [Level] * 3, policy=act, frames_per_batch=20, reset_kwargs=level, env_backend=backend
    ) as collector:
        for seed in (None, 3):
            if seed is not None:
                collector.set_seed(seed)
            batch = collector.next()
            for env in range(3):
                own = batch[batch["env_index"] == env]["observation"].flatten().tolist()
                assert own == [100 * env + step // 2 for step in range(len(own))]


def test_asynchronous_workers():
    options = {"frames_per_batch": 6, "reset_kwargs": level, "start_method": "inline"}
    with MultiAsyncCollector([Level] * 2, act, **options) as collector:
        seen = {collector.next()["observation"][0].item() // 100 for _ in range(4)}
    assert seen == {0.0, 1.0}


@pytest.mark.parametrize("seed", [5, np.int64(5)])
def test_a_function_may_return_seeds_or_nothing(seed):
    def given(env, episode):
        return {"seed": seed} if episode % 2 else None

    with Collector(Level(), act, frames_per_batch=12, reset_kwargs=given) as collector:
        collector.set_seed(2)
        rewards = collector.next()["next", "reward"].reshape(6, 2)
    assert torch.equal(rewards[1], rewards[3])
    assert not torch.equal(rewards[0], rewards[2])


class Game:
    def reset(self):
        pass


class Holding(Level):
    """Its attribute ``env`` is not an environment that it wraps."""

    def __init__(self):
        self.env = Game()


class Selfish(Level):
    def __init__(self):
        self.env = self


@pytest.mark.parametrize("make", [Holding, Selfish])
def test_only_wrappers_restrict_the_arguments(make):
    options = {"reset_kwargs": {"options": {"level": 4}}}
    with Collector(make, act, frames_per_batch=3, **options) as collector:
        assert collector.next()["observation"].flatten().tolist() == [4.0] * 3


# --- other kinds


def test_vector_environments_take_a_mapping():
    for mode in ("Disabled", "NextStep"):
        env = SyncVectorEnv([Level] * 2, autoreset_mode=mode)
        with Collector(env, act, frames_per_batch=12, reset_kwargs={"options": {"level": 4}}) as c:
            assert levels(c.next()) == [[4] * 6] * 2
    env = SyncVectorEnv([Level] * 2, autoreset_mode="Disabled")
    with pytest.raises(ValueError, match="takes one mapping for all sub-environments"):
        Collector(env, act, frames_per_batch=12, reset_kwargs=level)


class Noted(NumberedTorchEnv):
    def reset(self, *, seed=None, options=None):
        self.noted = [*getattr(self, "noted", []), (options or {}).get("level")]
        return super().reset(
            seed=seed, options={k: v for k, v in (options or {}).items() if k != "level"}
        )


def test_environments_of_tensors_take_a_mapping():
    env = Noted(2, lengths=[2])
    given = {"options": {"level": 3}}
    made = TorchVectorEnv(env, autoreset_mode="Disabled")
    with Collector(made, frames_per_batch=12, reset_kwargs=given) as collector:
        collector.next()
        assert set(env.noted[1:]) == {3}
    with pytest.raises(ValueError, match="takes one mapping for all"):
        Collector(
            TorchVectorEnv(Noted(2), autoreset_mode="Disabled"),
            frames_per_batch=4,
            reset_kwargs=level,
        )


class Curious(Walkers):
    def reset(self, seed=None, options=None):
        self.options = [*getattr(self, "options", []), options]
        return super().reset(seed, options)


def test_agents_get_options():
    env = Curious()
    with Collector(PettingZooEnv(env), frames_per_batch=12, reset_kwargs=level) as collector:
        collector.next()
    assert [one["level"] for one in env.options if one] == list(range(len(env.options) - 1))


def test_an_environment_that_stays_open_forgets_them():
    env = SerialEnv(1, Level)
    collector = Collector(env, act, frames_per_batch=2, reset_kwargs={"options": {"level": 4}})
    collector.shutdown(close_env=False)
    assert env.reset()["observation"].item() == -1
    env.close()


class Closed(Level):
    def reset(self, *, seed=None):
        return super().reset(seed=seed)


@pytest.mark.parametrize(
    ("make", "given", "kind", "match"),
    [
        (Level, {"level": 1}, TypeError, "has level, but the reset of environment 0 takes options"),
        (Level, {"options": 3}, TypeError, "options in reset_kwargs must be a mapping, .* 3"),
        (Level, {"seed": 3}, ValueError, "reset_kwargs has seed=3"),
        (Level, 3, TypeError, "reset_kwargs must be a mapping .* or a function .* 3"),
        (Level, dict, TypeError, "reset_kwargs must be a mapping"),
        (Level, {1: 2}, TypeError, "must map names of arguments to values, but it has 1"),
        (Level, lambda env: {}, TypeError, "must be a function of two arguments"),
        (Level, lambda env, episode: 3, TypeError, "environment 0 and episode 0 must be a mapping"),
        (Level, lambda env, episode: {"x": 3}, TypeError, "episode 0 has x, but the reset of"),
        (
            Level,
            lambda env, episode: {"seed": "a"},
            TypeError,
            "the seed in what reset_kwargs returned for .* must be an integer, but it is 'a'",
        ),
        (Closed, {"options": {}}, TypeError, "has options, but the reset of .* takes seed"),
        ("dm_control:cartpole/balance", {"options": {}}, ValueError, "the reset takes no argum"),
        (
            lambda: SyncVectorEnv([Level], autoreset_mode="SameStep"),
            {"options": {}},
            ValueError,
            "SyncVectorEnv.* resets them in the step that ends them: .*'Disabled'",
        ),
        (
            lambda: gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"),
            {"options": {}},
            ValueError,
            "CartPoleVectorEnv.* resets them in the step after their end: .* a list of environm",
        ),
    ],
)
def test_wrong_values_are_named_by_the_constructor(make, given, kind, match):
    if isinstance(make, str):
        pytest.importorskip(make.split(":")[0])
    with pytest.raises(kind, match=match):
        Collector(make if isinstance(make, str) else make(), frames_per_batch=4, reset_kwargs=given)


def test_wrong_values_are_named_by_constructors_elsewhere():
    given = {"level": 1}
    for make in (lambda: ParallelEnv(2, Level), lambda: [torchrl_level]):
        with pytest.raises(TypeError, match=r"(?s)level.*reset|reset.*level"):
            Collector(make(), act, frames_per_batch=4, reset_kwargs=given).next()
    with pytest.raises(TypeError, match="has level, but the reset of environment"):
        MultiSyncCollector([Level] * 2, act, frames_per_batch=4, reset_kwargs=given)
    for cls in (MultiSyncCollector, AsyncBatchedCollector):
        with pytest.raises(TypeError, match="reset_kwargs must be a mapping"):
            cls([Level] * 2, policy=act, frames_per_batch=4, reset_kwargs=3)


# --- states and failures


@pytest.mark.parametrize(
    "make",
    [
        lambda: Level(),
        lambda: Handle(),
        lambda: ParallelEnv(2, [Level, Handle]),
        lambda: PettingZooEnv(Curious()),
    ],
    ids=["plain", "replayed", "processes", "agents"],
)
def test_states_go_on_with_the_same_episodes(make):
    policy = None if "PettingZoo" in repr(make()) else act
    options = {"frames_per_batch": 10, "reset_kwargs": level}
    with Collector(make(), policy, **options) as collector:
        collector.set_seed(1)
        collector.next()
        state, expected = collector.state_dict(), [collector.next().clone() for _ in range(2)]
    with Collector(make(), policy, **options) as collector:
        collector.load_state_dict(state)
        assert all((collector.next() == one).all() for one in expected)
        with pytest.raises(ValueError, match=r"episodes_begun.*must be an integer"):
            collector.load_state_dict({**state, "episodes_begun": [-1]})


def test_new_episodes_after_a_state_are_numbered_on():
    options = {"frames_per_batch": 10, "reset_kwargs": level}
    with Collector(Stubborn(), act, **options) as collector:
        collector.next()
        state = collector.state_dict()
    with Collector(Stubborn(), act, **options) as collector:
        collector.load_state_dict(state)
        first = collector.next()["observation"][0].item()
    assert first == state["episodes_begun"][0]


@pytest.mark.parametrize("dies_at", [5, -5], ids=["death", "error"])
@pytest.mark.filterwarnings("ignore:.*(restarted|rebuilt|status 3|edge):RuntimeWarning")
def test_environments_that_are_made_anew_go_on_counting(dies_at):
    makes = [partial(Mortal, dies_at), Level]
    env = ParallelEnv(2, makes) if dies_at > 0 else makes
    with Collector(
        env, act, frames_per_batch=20, reset_kwargs=level, on_env_error="restart"
    ) as collector:
        batch = collector.next()
    real = [
        row[mask].flatten().tolist()
        for row, mask in zip(batch["observation"], batch["collector", "mask"], strict=True)
    ]
    assert real[1] == [100 + step // 2 for step in range(10)]
    # The episode under way was lost, and its number is not used again.
    assert real[0] == [0, 0, 1, 1, 3, 3, 4, 4]


def test_workers_that_replace_others_go_on_counting(tmp_path):
    mark = tmp_path / "dead"

    class DiesOnce(Stubborn):
        def step(self, action):
            if self.steps == 30 and not mark.exists():
                mark.touch()
                os._exit(3)
            return super().step(action)

    with (
        MultiSyncCollector(
            [Level, DiesOnce], act, frames_per_batch=20, reset_kwargs=level
        ) as collector,
        pytest.warns(RuntimeWarning, match="status 3"),
    ):
        found = [levels(collector.next())[1] for _ in range(5)]
    assert mark.exists()
    firsts = [row[0] for row in found]
    assert firsts == sorted(set(firsts))
    assert all(100 <= one < 200 for row in found for one in row)
