"""Frozen statistics and videos."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from evaluation_parts import Walk, linear
from gymnasium.wrappers import NormalizeObservation, NormalizeReward

from trawl.collectors import Collector, Evaluator


def normalised(mean: float) -> NormalizeObservation:
    env = NormalizeObservation(Walk())
    env.obs_rms.mean[:] = mean
    env.obs_rms.count = 1000.0
    return env


def test_statistics_of_observations_are_frozen() -> None:
    env = normalised(3.0)
    with Evaluator(NormalizeReward(env), linear(), num_trajectories=4) as evaluator:
        first = evaluator.evaluate().episodes.returns.tolist()
        assert evaluator.evaluate().episodes.returns.tolist() == first
        # The collector's first reset was before; after that nothing has moved.
        mean, count = env.obs_rms.mean.tolist(), env.obs_rms.count
        evaluator.evaluate()
        assert (env.obs_rms.mean.tolist(), env.obs_rms.count) == (mean, count)
    assert env.update_running_mean is False


def test_statistics_of_vector_environments_are_frozen() -> None:
    vector = gymnasium.vector.SyncVectorEnv([partial(normalised, 3.0), partial(normalised, 3.0)])
    with Evaluator(vector, linear(), num_trajectories=4) as evaluator:
        evaluator.evaluate()
    assert [env.update_running_mean for env in vector.envs] == [False, False]


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


def test_a_callback_gets_the_video() -> None:
    given: list[Any] = []
    make = partial(Walk, render_mode="rgb_array")
    with Evaluator(make, linear(), num_trajectories=1, on_result=given.append) as evaluator:
        result = evaluator.evaluate()
    assert torch.equal(given[0]["eval/video"], result["eval/video"])
    assert given[0]["eval/fps"] > 0
