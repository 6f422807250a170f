"""Collectors of ALE's own vector environment, which returns whichever Atari games are ready."""

import functools

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

from trawl.collectors import AsyncBatchedCollector, Collector
from trawl.envs import GymEnv

# Older versions have no `AtariVectorEnv`, or one that does not state its autoreset mode.
pytest.importorskip("ale_py", minversion="0.12", reason="needs ale-py 0.12")
from ale_py.vector_env import AtariVectorEnv

GAME, SEED, FRAMES = "breakout", 7, 80


def games(num_envs, batch_size, mode):
    """Small games that end after some steps, each after another number of no-ops."""
    return AtariVectorEnv(
        GAME,
        num_envs,
        batch_size=batch_size,
        num_threads=2,
        autoreset_mode=mode,
        img_height=21,
        img_width=21,
        stack_num=2,
        noop_max=12,
        max_num_frames_per_episode=80,
    )


def action_of(observation):
    """The action that the pixels name, for numpy's arrays and for tensors."""
    return observation.reshape(len(observation), -1).sum(-1) % 4


class Pixels(nn.Module):
    """Policy that takes this action."""

    def forward(self, observation):
        return nn.functional.one_hot(action_of(observation.long()), 4)


KEYS = ["observation", "action", ("next", "observation")]
KEYS += [("next", name) for name in ("reward", "terminated", "truncated")]


@functools.cache
def played_by_hand(steps):
    """The frames of each of three games: their entries under ``KEYS``."""
    envs = games(3, 0, AutoresetMode.NEXT_STEP)
    frames = [[] for _ in range(3)]
    obs, _ = envs.reset(seed=SEED)
    ended = np.zeros(3, bool)
    for _ in range(steps):
        actions = action_of(obs.astype(np.int64))
        after, *results, _ = envs.step(actions)
        for env in np.flatnonzero(~ended):
            frames[env].append([each[env] for each in (obs, actions, after, *results)])
        obs, ended = after, results[1] | results[2]
    return frames


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (Collector, AutoresetMode.SAME_STEP),
        (AsyncBatchedCollector, AutoresetMode.NEXT_STEP),
        (AsyncBatchedCollector, AutoresetMode.SAME_STEP),
    ],
)
def test_each_game_goes_as_if_it_were_played_by_hand(kind, mode):
    by_hand = played_by_hand(FRAMES)
    env = GymEnv(games(3, 2, mode))
    env.set_seed(SEED)
    with kind(env, policy=Pixels(), frames_per_batch=FRAMES, total_frames=FRAMES) as collector:
        (batch,) = collector
    assert len(batch) == FRAMES
    assert batch["next", "done"].any()
    batch["action"] = batch["action"].argmax(-1)
    # On a busy machine, ALE may return some of the games only rarely.
    for game, expected in enumerate(by_hand):
        for frame, entries in zip(batch[batch["env_index"] == game], expected, strict=False):
            for key, value in zip(KEYS, entries, strict=True):
                assert (frame[key].numpy() == value).all(), key


def test_all_games_together_are_a_batch_of_environments():
    env = GymEnv(games(3, 3, AutoresetMode.SAME_STEP))
    with Collector(env, Pixels(), frames_per_batch=30) as collector:
        batch = collector.next()
    assert batch.shape == (3, 10)
    assert batch["observation"].dtype == torch.uint8
