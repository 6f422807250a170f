"""An environment whose state can't be read repeats its episode."""

import gymnasium
import numpy as np
import pytest
from closed_envs import Closed, Forgetful, Latched
from gymnasium import wrappers
from gymnasium.wrappers.utils import RunningMeanStd

from tests.oracle.continuing import saved
from trawl.envs import GymEnv
from trawl.envs.capture.episode_log import EpisodeLog
from trawl.envs.capture.ways import chain
from trawl.errors import EnvStateError


def wrapped(env):
    env = wrappers.TimeLimit(env, 60)
    env = wrappers.FrameStackObservation(env, 3)
    env = wrappers.NormalizeReward(wrappers.NormalizeObservation(env))
    return wrappers.RecordEpisodeStatistics(env)


def logged(env, **options):
    env = GymEnv(env, **options)
    env.keep_log()
    return env


def drive(env, root, steps):
    """Steps with random actions, and resets at each end; returns the frames, and what follows."""
    frames = []
    for _ in range(steps):
        frame, root = env.step_and_maybe_reset(env.rand_action(root))
        frames.append(frame)
    return frames, root


def drive_into(env, root, steps, episodes=1):
    """Steps until an episode has some steps; returns what follows."""
    while env.log.steps < steps or env.env.unwrapped.episodes < episodes:
        _, root = drive(env, root, 1)
    return root


def test_arguments_of_the_reset_are_repeated():
    env, other = logged(Closed()), logged(Closed())
    drive_into(env, env.reset(seed=4, options={"drift": 100}), 3)
    other.restore(saved(env.capture()))
    assert (other.log.observed[0] == env.log.observed[0]).all()
    assert other.env.episodes == env.env.episodes == 1


def test_the_statistics_of_wrappers_are_those_of_all_episodes():
    env, other = logged(wrapped(Closed())), logged(wrapped(Closed()))
    drive(env, env.reset(), 200)
    other.restore(saved(env.capture()))
    assert len(env.env.return_queue) > 2
    assert other.env.return_queue == env.env.return_queue
    # Times can't be repeated.
    assert other.env.episode_start_time == env.env.episode_start_time
    one, two = (
        next(vars(member)["obs_rms"] for member in chain(env.env) if "obs_rms" in vars(member))
        for env in (env, other)
    )
    assert isinstance(one, RunningMeanStd)
    assert (one.mean == two.mean).all()


class Records(gymnasium.Wrapper):
    """Keeps all rewards, for ever."""

    def __init__(self, env):
        super().__init__(env)
        self.rewards = []

    def step(self, action):
        result = self.env.step(action)
        self.rewards.append(result[1])
        return result


def test_long_records_of_wrappers_are_as_they_were():
    env, other = logged(Records(Closed())), logged(Records(Closed()))
    drive(env, env.reset(), 400)
    state = saved(env.capture())
    assert len(str(state["env"]["replay"]["origin"])) < 2000
    other.restore(state)
    assert other.env.rewards == env.env.rewards
    assert len(env.env.rewards) == 400


def test_a_world_of_box2d_that_outlives_its_episodes():
    pytest.importorskip("Box2D", reason="Box2D is not installed")
    env = logged(gymnasium.make("BipedalWalker-v3"))
    drive(env, env.reset(seed=1), 5)
    assert env.state_methods == ["none"]
    with pytest.raises(EnvStateError, match="replay: its episodes share a world of Box2D"):
        env.capture()
    env.close()


# --- what can't be replayed


def test_plain_environments_keep_no_log():
    env = logged(gymnasium.make("CartPole-v1"))
    env.reset()
    assert env.log is None


def test_without_a_log_there_is_no_way():
    env = GymEnv(Closed())
    env.reset()
    assert env.state_methods == ["none"]
    with pytest.raises(EnvStateError, match="can't be captured: attributes"):
        env.capture()


class Bare(gymnasium.Env):
    """An environment without a generator of its own."""

    np_random = None

    def __init__(self):
        self.inner = Closed()
        self.observation_space, self.action_space = (
            self.inner.observation_space,
            self.inner.action_space,
        )

    def reset(self, *, seed=None, options=None):
        return self.inner.reset(seed=seed)

    def step(self, action):
        return self.inner.step(action)


def test_an_environment_without_a_generator_is_replayed_only_if_it_was_seeded():
    env = logged(Bare())
    env.reset()
    assert env.state_methods == ["none"]
    with pytest.raises(EnvStateError, match="no generator, and was reset without a seed"):
        env.capture()
    env = logged(Bare())
    drive(env, env.reset(seed=3), 2)
    assert env.log.steps == 2
    assert env.state_methods == ["replay"]
    other = logged(Bare())
    other.restore(env.capture())
    assert (other.log.observed[0] == env.log.observed[0]).all()


def test_long_episodes_are_given_up_until_the_next_one(monkeypatch):
    monkeypatch.setattr(EpisodeLog, "most_steps", 5)
    env = logged(Closed())
    drive(env, env.reset(seed=1), 5)
    assert env.state_methods == ["replay"]
    drive(env, env.reset(seed=1), 6)
    assert env.state_methods == ["none"]
    with pytest.raises(EnvStateError, match="replay: more than 5 steps would have to be repeated"):
        env.capture()
    env.reset()
    assert env.state_methods == ["replay"]


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Forgetful, r"observation 'observation' after them differs"),
        (
            Latched,
            r"differs from the one to go on from|rewards differ|its episode ended|generators",
        ),
    ],
)
def test_a_replay_with_other_results_is_an_error(kind, match):
    env, other = logged(kind()), logged(kind())
    drive_into(env, env.reset(seed=1), 5)
    if kind is Latched:
        drive(env, env.reset(), 5)
    with pytest.raises(EnvStateError, match=match):
        other.restore(env.capture())
    assert other.state_methods == ["none"]


def test_an_error_in_a_replay_names_the_environment():
    env, other = logged(Closed()), logged(Closed(fails_at=[3]))
    drive_into(env, env.reset(seed=3), 5)
    with pytest.raises(EnvStateError, match=r"Closed.* can't be replayed: RuntimeError: broken"):
        other.restore(env.capture())


def test_the_wrappers_after_the_replay_count():
    env = logged(wrapped(Closed()))
    drive(env, env.reset(seed=1), 200)
    state = saved(env.capture())
    wrappers = state["env"]["replay"]["wrappers"]
    (timed,) = (one for one in wrappers if "episode_start_time" in one)
    timed["episode_start_time"] = 5.0
    other = logged(wrapped(Closed()))
    other.restore(state)
    assert other.env.episode_start_time == 5.0
    del timed["episode_start_time"]
    with pytest.raises(EnvStateError, match=r"must have the attributes .*episode_start_time"):
        other.restore(state)


def test_rewards_are_compared():
    env, other = logged(Closed()), logged(Closed())
    drive_into(env, env.reset(seed=3), 5)
    state = env.capture()
    state["env"]["replay"]["rewards"] += 1
    with pytest.raises(EnvStateError, match=r"5 steps of .*Closed.* but their rewards differ"):
        other.restore(state)


def test_numpy_actions_keep_their_types():
    seen = []

    class Typed(Closed):
        def step(self, action):
            seen.append((type(action), getattr(action, "dtype", None)))
            return super().step(action)

    env, other = logged(Typed()), logged(Typed())
    drive_into(env, env.reset(seed=3), 5)
    before = seen[-5:]
    seen.clear()
    other.restore(env.capture())
    assert seen == before
    assert before[0] == (np.int64, np.dtype(np.int64))
