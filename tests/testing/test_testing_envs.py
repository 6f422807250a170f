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


def test_episodes_end_as_they_were_told_to_and_the_reward_counts_steps():
    env = NumberedEnv(lengths=[1, 2], ends=["terminated", "truncated", "both"])
    found = []
    for _ in range(3):
        env.reset()
        over = False
        while not over:
            _, reward, terminated, truncated, _ = env.step(0)
            over = terminated or truncated
            found.append((reward, terminated, truncated))
    assert found == [(1, True, False), (2, False, False), (3, False, True), (4, True, True)]


def step(action):
    env = NumberedEnv()
    env.reset()
    env.step(action)


def reset_some():
    env = SelfResettingVectorEnv([NumberedEnv])
    env.reset(options={"reset_mask": np.array([True])})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: NumberedEnv(lengths=[]), "lengths"),
        (lambda: NumberedEnv(lengths=[0]), "lengths"),
        (lambda: NumberedEnv(lengths=[3, -1]), "lengths"),
        (lambda: NumberedEnv(ends=["finished"]), "ends"),
        (lambda: FaultyEnv(1, "smoke"), "fault"),
        (lambda: step(4), "action 4"),
        (reset_some, "all environments must be reset together"),
    ],
)
def test_what_there_is_not_is_refused(call, told):
    with pytest.raises(ValueError, match=told):
        call()


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("nan", lambda results: np.isnan(results[1])),
        ("shape", lambda results: len(results[0]) == 4),
    ],
)
def test_a_fault_comes_once_at_its_step(fault, shown):
    env = FaultyEnv(1, fault, lengths=[9])
    env.reset()
    assert [shown(env.step(0)) for _ in range(3)] == [False, True, False]
    env = FaultyEnv(2, RuntimeError("out of paint"), lengths=[9])
    env.reset()
    env.step(0)
    env.step(0)
    with pytest.raises(RuntimeError, match="out of paint"):
        env.step(0)


def test_a_self_resetting_vector_spends_the_step_after_an_end_on_resetting():
    env = SelfResettingVectorEnv([lambda: NumberedEnv(lengths=[1])] * 2)
    env.reset()
    _, _, terminated, _, _ = env.step(np.zeros(2, dtype=np.int64))
    obs, reward, terminated_next, _, _ = env.step(np.zeros(2, dtype=np.int64))
    assert terminated.all()
    assert not terminated_next.any()
    assert not reward.any()
    assert obs[:, :3].tolist() == [[0, 1, 0]] * 2


def test_an_image_shows_the_numbers_of_the_last_observation():
    env = NumberedEnv(7, lengths=[300], render_mode="rgb_array")
    env.reset()
    for _ in range(299):
        env.step(2)
    frames = GymEnv(ImageEnv(7)).reset().set("observation", torch.from_numpy(env.render()))
    assert ImageEnv.numbers(frames).tolist() == [7, 0, 299, 299, 2]
