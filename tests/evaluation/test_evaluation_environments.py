"""Frozen statistics and videos."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from evaluation_parts import Walk, linear
from gymnasium import spaces
from gymnasium.wrappers import NormalizeObservation, NormalizeReward

from trawl.collectors import Collector, Evaluator


def normalised(mean: float) -> NormalizeObservation:
    env = NormalizeObservation(Walk())
    env.obs_rms.mean[:] = mean
    env.obs_rms.count = 1000.0
    return env


@pytest.mark.parametrize("several", [False, True])
def test_statistics_of_observations_are_frozen(several: bool) -> None:
    make = partial(normalised, 3.0)
    env = gymnasium.vector.SyncVectorEnv([make, make]) if several else make()
    with Evaluator(env if several else NormalizeReward(env), linear()) as evaluator:
        first = evaluator.evaluate().episodes.returns.tolist()
        assert evaluator.evaluate().episodes.returns.tolist() == first
    for one in env.envs if several else [env]:
        assert (one.obs_rms.mean.tolist(), one.obs_rms.count) == ([3.0, 3.0], 1000.0)
        assert one.update_running_mean is True  # as before the evaluator


def test_the_learners_statistics_can_be_shared() -> None:
    """The evaluation normalises by what the learner's environment has seen by now."""
    learner = NormalizeObservation(Walk())

    def make() -> NormalizeObservation:
        env = NormalizeObservation(Walk())
        env.obs_rms = learner.obs_rms
        return env

    with (
        Evaluator(make, linear(), num_trajectories=4) as evaluator,
        Collector(learner, linear(), frames_per_batch=100) as collector,
    ):
        before = evaluator.evaluate().episodes.returns.tolist()
        collector.next()
        count = learner.obs_rms.count
        assert evaluator.evaluate().episodes.returns.tolist() != before
        assert learner.obs_rms.count == count
        assert learner.update_running_mean


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_the_first_episode_is_rendered(backend: str) -> None:
    make = partial(Walk, render_mode="rgb_array")
    with Evaluator(make, linear(), num_trajectories=3, num_envs=2, backend=backend) as evaluator:
        for _ in range(2):
            result = evaluator.evaluate()
            video = result["eval/video"]
            assert video.dtype == torch.uint8
            length = int(result.episodes.lengths[0])
            assert video.shape == (length + 1, 4, 6, 3)
            # From what the reset gave to the end: they count down the steps that are left.
            assert video[:, 0, 0, 0].tolist() == list(range(length, -1, -1))
    with Evaluator(make, linear(), num_trajectories=1, dump_video=False) as evaluator:
        assert "eval/video" not in evaluator.evaluate()
    with Evaluator(Walk, linear(), num_trajectories=1) as evaluator:
        assert "eval/video" not in evaluator.evaluate()


class MaskedWalk(Walk):
    """Allows two of three actions, as its info says, and refuses the other one."""

    action_space = spaces.Discrete(3)
    allowed = np.array([1, 0, 1], np.int8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, _ = super().reset(seed=seed)
        return obs, {"action_mask": self.allowed}

    def step(self, action: Any) -> Any:
        assert self.allowed[action]
        return *super().step([action])[:4], {"action_mask": self.allowed}


@pytest.mark.parametrize("num_envs", [1, 2])
def test_masks_in_info_are_followed_in_each_evaluation(num_envs: int) -> None:
    """Also while an environment is idle, as with two of them for three episodes."""
    options = {"num_trajectories": 3, "num_envs": num_envs, "policy_factory": lambda: None}
    with Evaluator(MaskedWalk, **options) as evaluator:
        first, second = evaluator.evaluate(), evaluator.evaluate()
    assert first.episodes.lengths.tolist() == second.episodes.lengths.tolist()
    assert first.episodes.returns.tolist() == second.episodes.returns.tolist()
