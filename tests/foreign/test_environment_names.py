"""What Trawl takes from libraries of environments under private names; what breaks without it."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from trawl.foreign import environments as names


def pendulum():
    return gymnasium.make("Pendulum-v1")


def test_an_async_batch_tells_what_it_waits_for():
    """Otherwise closing it would wait forever for a process that died."""
    env = AsyncVectorEnv([pendulum])
    try:
        env.reset(seed=0)
        assert names.state_of(env, None) is AsyncState.DEFAULT
        env.step_async(env.action_space.sample())
        assert names.state_of(env, None) is AsyncState.WAITING_STEP
        env.step_wait()
    finally:
        env.close()
    assert names.state_of(object(), "default") == "default"


def test_a_wrapper_tells_the_name_of_its_statistics():
    """Infos of that name come only in some steps, and have a column of their own."""
    env = RecordEpisodeStatistics(SyncVectorEnv([pendulum]), stats_key="mine")
    assert names.statistics_key(env) == "mine"
    assert names.statistics_key(env.env) is None
    env.close()


def test_a_space_tells_whether_it_was_seeded():
    """A captured state of the space would otherwise begin a generator."""
    space = gymnasium.spaces.Discrete(2)
    assert not names.is_seeded(space)
    space.seed(1)
    assert names.is_seeded(space)
    names.unseed(space)
    assert not names.is_seeded(space)
    assert space.np_random is not None


def test_constant_attributes_are_those_of_environments():
    """Others belong to the state of an environment: one that is no longer there is elsewhere."""
    env = pendulum()
    _ = env.spec
    wrapper = gymnasium.wrappers.TimeAwareObservation(env)
    _ = wrapper.spec
    there = {*vars(env), *vars(env.unwrapped), *vars(wrapper)}
    assert {"_saved_kwargs", "_cached_spec", "_metadata"} == names.CONSTANT
    assert there >= names.CONSTANT


def test_a_batch_writes_observations_into_one_array():
    """The array of a captured state must fit that of the environment."""
    env = SyncVectorEnv([pendulum, pendulum], copy=False)
    observations, _ = env.reset(seed=0)
    assert vars(env)[names.OBSERVATIONS] is observations
    env.close()


def test_atari_has_its_constant_attributes():
    """They would otherwise be captured with each state, and compared."""
    ale = pytest.importorskip("ale_py")
    gymnasium.register_envs(ale)
    env = gymnasium.make("ALE/Pong-v5")
    assert vars(env.unwrapped).keys() >= names.ATARI_CONSTANT
    env.close()


def test_envpool_has_the_calls_inside_its_public_methods():
    """Without them, each step of a pool converts its results twice."""
    envpool = pytest.importorskip("envpool")
    pool = envpool.make_gymnasium("Pendulum-v1", num_envs=2, seed=1)
    try:
        states, actions = names.envpool_keys(pool, "state"), names.envpool_keys(pool, "action")
        assert {"info:env_id", "obs", "reward", "done", "trunc"} <= set(states)
        assert actions == ["env_id", "players.env_id", "action"]
        ids = np.arange(2, dtype=np.int32)
        names.envpool_method(pool, "reset")(ids)
        first = names.envpool_method(pool, "recv")()
        assert len(first) == len(states)
        assert sorted(first[states.index("info:env_id")]) == [0, 1]
        names.envpool_method(pool, "send")([ids, ids, np.zeros((2, 1))])
        assert len(names.envpool_method(pool, "recv")()) == len(states)
    finally:
        pool.close()
    assert names.envpool_method(object(), "recv") is None
    assert names.envpool_keys(object(), "state") == []


def test_brax_has_a_table_of_its_environments():
    """An unknown name would be reported without the known ones."""
    brax = pytest.importorskip("brax.envs")
    table = names.brax_environments(brax)
    assert "ant" in table
    assert isinstance(table["ant"], type)


def test_a_wrapper_of_jumanji_has_the_environment_in_it():
    """The limit of an episode is in the environment, and not in its wrappers."""
    wrappers = pytest.importorskip("jumanji.wrappers")

    class Inner:
        observation_spec = action_spec = reward_spec = discount_spec = None

    inner = Inner()
    wrapper = wrappers.Wrapper(inner)
    assert names.jumanji_inner(vars(wrapper)) is inner
    assert names.jumanji_inner({}) is None
