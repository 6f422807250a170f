"""Gymnasium's wrappers for rewards and actions, on each path that the documentation names."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector

from trawl.collectors import Collector, MultiSyncCollector

MASK = ("collector", "mask")


class Walk(gymnasium.Env):
    """Random rewards in episodes of random length; the observation is the last action."""

    observation_space = spaces.Box(-3.0, 3.0, (1,), np.float32)
    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        ended = bool(self.np_random.random() < 0.2)
        return np.float32(action), float(self.np_random.normal() * 3), ended, False, {}


def double(reward):
    return 2 * reward


REWARDS = {
    "clip": (
        functools.partial(wrappers.ClipReward, min_reward=-1, max_reward=1),
        functools.partial(vector.ClipReward, min_reward=-1, max_reward=1),
        lambda reward: reward.clamp(-1, 1),
    ),
    "transform": (
        functools.partial(wrappers.TransformReward, func=double),
        functools.partial(vector.TransformReward, func=double),
        double,
    ),
}


def act(observation):
    """An action that is out of bounds."""
    return torch.full_like(observation, 5.0)


def collected(source, cls=Collector, policy=None):
    options = {"start_method": "inline"} if cls is MultiSyncCollector else {}
    with cls(source, policy, frames_per_batch=60, **options) as collector:
        collector.set_seed(0)
        batch = collector.next()
        assert collector.stats()["env_path"] == "array"
    mask = batch.get(MASK, torch.ones(batch.shape, dtype=torch.bool))
    return batch, mask


def wrapped(kind):
    return REWARDS[kind][0](Walk())


def sync(make, mode):
    return SyncVectorEnv([make] * 2, autoreset_mode=mode)


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_rewards_of_single_environments(kind, cls):
    make, change = functools.partial(wrapped, kind), REWARDS[kind][2]
    raw, _ = collected([Walk] * 2, cls)
    found, _ = collected([make] * 2, cls)
    torch.testing.assert_close(found["next", "reward"], change(raw["next", "reward"]))
    assert torch.equal(found["next", "done"], raw["next", "done"])


@pytest.mark.parametrize(
    ("kind", "mode", "inside"),
    [
        (kind, mode, (i + j) % 2 == 0)
        for i, kind in enumerate(REWARDS)
        for j, mode in enumerate(AutoresetMode)
    ],
)
def test_rewards_of_vectors(kind, mode, inside):
    _, several, change = REWARDS[kind]
    if inside:
        source = functools.partial(sync, functools.partial(wrapped, kind), mode)
    else:
        source = lambda: several(sync(Walk, mode))  # noqa: E731
    raw, _ = collected(functools.partial(sync, Walk, mode))
    found, mask = collected(source)
    if mask.all():
        torch.testing.assert_close(found["next", "reward"], change(raw["next", "reward"]))
    # With a wrapper that may keep statistics, a reset takes a row. Frames are otherwise the same.
    for row, own in enumerate(found):
        rewards = own["next", "reward"][mask[row]]
        expected = change(raw[row]["next", "reward"])[: len(rewards)]
        torch.testing.assert_close(rewards, expected)


BOUNDS = {"min_action": np.float32(-10), "max_action": np.float32(10)}
ACTIONS = {
    "clip": (wrappers.ClipAction, vector.ClipAction, 2.0),
    "rescale": (
        functools.partial(wrappers.RescaleAction, **BOUNDS),
        functools.partial(vector.RescaleAction, **BOUNDS),
        1.0,
    ),
}


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("mode", [None, *AutoresetMode])
def test_actions_are_clipped_and_rescaled(kind, mode):
    one, several, expected = ACTIONS[kind]
    source = (lambda: one(Walk())) if mode is None else (lambda: several(sync(Walk, mode)))
    batch, mask = collected(source, policy=act)
    assert (batch["next", "observation"][mask] == expected).all()
    assert (batch["action"][mask] == 5).all()
