"""The environments that others are tested with do what they say."""

import numpy as np
import pytest
import torch
from gymnasium.wrappers import PassiveEnvChecker

from trawl.envs import GymEnv
from trawl.testing import (
    FaultyEnv,
    ImageEnv,
    NestedEnv,
    NumberedEnv,
    RaggedEnv,
    SelfResettingVectorEnv,
)

KINDS = [NumberedEnv, ImageEnv, NestedEnv, RaggedEnv]


@pytest.mark.parametrize("kind", KINDS)
def test_its_spaces_hold_what_it_observes(kind):
    # Gymnasium's wrapper checks types and shapes besides.
    env = PassiveEnvChecker(kind(3, lengths=[20]))
    obs, _ = env.reset()
    for _ in range(20):
        assert env.observation_space.contains(obs)
        obs, *_ = env.step(env.action_space.sample())


@pytest.mark.parametrize("kind", KINDS)
def test_its_numbers_can_be_read_from_its_frames(kind):
    env = GymEnv(kind(5, lengths=[40, 2]))
    frames = env.rollout(42, break_when_any_done=False)
    actions = kind.action_numbers(frames).tolist()
    steps = [(0, step) for step in range(40)] + [(1, 0), (1, 1)]
    starts = {0, 40}
    expected = [
        [5, episode, step, total, -1 if total in starts else actions[total - 1]]
        for total, (episode, step) in enumerate(steps)
    ]
    assert kind.numbers(frames).tolist() == expected
    assert env.env.actions == actions


def test_episodes_end_as_they_were_told_to():
    env = NumberedEnv(lengths=[1, 2], ends=["terminated", "truncated", "both"])
    found = []
    for _ in range(3):
        env.reset()
        terminated = truncated = False
        steps = 0
        while not (terminated or truncated):
            _, _, terminated, truncated, _ = env.step(0)
            steps += 1
        found.append((steps, terminated, truncated))
    assert found == [(1, True, False), (2, False, True), (1, True, True)]


def test_the_reward_is_the_number_of_steps_in_all():
    env = NumberedEnv(lengths=[2])
    rewards = []
    for _ in range(2):
        env.reset()
        rewards += [env.step(1)[1] for _ in range(2)]
    assert rewards == [1, 2, 3, 4]


@pytest.mark.parametrize("lengths", [[], [0], [3, -1]])
def test_lengths_that_are_not_positive_are_refused(lengths):
    with pytest.raises(ValueError, match="lengths"):
        NumberedEnv(lengths=lengths)


def test_an_unknown_end_is_refused():
    with pytest.raises(ValueError, match="ends"):
        NumberedEnv(ends=["finished"])


def test_an_action_outside_of_the_space_is_refused():
    env = NumberedEnv()
    env.reset()
    with pytest.raises(ValueError, match="action 4"):
        env.step(4)


def test_a_fault_comes_at_its_step_and_not_before():
    env = FaultyEnv(2, RuntimeError("out of paint"), lengths=[9])
    env.reset()
    env.step(0)
    env.step(0)
    with pytest.raises(RuntimeError, match="out of paint"):
        env.step(0)


def test_a_faulty_reward_is_nan_once():
    env = FaultyEnv(1, "nan", lengths=[9])
    env.reset()
    assert [np.isnan(env.step(0)[1]) for _ in range(3)] == [False, True, False]


def test_a_faulty_observation_has_another_shape_once():
    env = FaultyEnv(1, "shape", lengths=[9])
    env.reset()
    assert [len(env.step(0)[0]) for _ in range(3)] == [5, 4, 5]


def test_an_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="fault"):
        FaultyEnv(1, "smoke")


def test_a_self_resetting_vector_spends_the_step_after_an_end_on_resetting():
    env = SelfResettingVectorEnv([lambda: NumberedEnv(lengths=[1])] * 2)
    env.reset()
    _, _, terminated, _, _ = env.step(np.zeros(2, dtype=np.int64))
    obs, reward, terminated_next, _, _ = env.step(np.zeros(2, dtype=np.int64))
    assert terminated.all()
    assert not terminated_next.any()
    assert not reward.any()
    assert obs[:, :3].tolist() == [[0, 1, 0]] * 2


def test_a_self_resetting_vector_refuses_to_reset_some():
    env = SelfResettingVectorEnv([NumberedEnv])
    with pytest.raises(ValueError, match="all environments must be reset together"):
        env.reset(options={"reset_mask": np.array([True])})


def test_an_image_shows_the_numbers_of_the_last_observation():
    env = NumberedEnv(7, lengths=[300], render_mode="rgb_array")
    env.reset()
    for _ in range(299):
        env.step(2)
    frames = GymEnv(ImageEnv(7)).reset().set("observation", torch.from_numpy(env.render()))
    assert ImageEnv.numbers(frames).tolist() == [7, 0, 299, 299, 2]
