"""Results of single episodes: which episodes count, how they are paired, and their estimates."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from trawl.collectors import Evaluator, bootstrap_estimate, paired_comparison

RETURNS = torch.tensor([[0.0, 0.0, 0.0, 100.0], [5.0, 5.0, 5.0, 5.0]])


class Drawn(gymnasium.Env[Any, Any]):
    """Episodes whose start is drawn, and whose length the policy decides.

    The sum of the rewards identifies how an episode began.
    """

    def __init__(self, source: str = "own", length: int | None = None) -> None:
        self.source, self.length = source, length
        self.observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def draw(self) -> float:
        draws = {
            "own": self.np_random.random,
            "numpy": np.random.rand,
            "random": random.random,
            "torch": lambda: float(torch.rand(())),
        }
        return float(draws[self.source]())

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.start, self.steps = self.draw(), 0
        return np.array([self.start], np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.draw()
        ends = self.steps >= (self.length or (2 + 3 * int(action)))
        return np.array([self.start], np.float32), self.start if ends else 0.0, ends, False, {}


class Always(nn.Module):
    def __init__(self, action: int) -> None:
        super().__init__()
        self.action = nn.Parameter(torch.tensor(float(action)))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        choice = self.action.round().long()
        return nn.functional.one_hot(choice, 2).expand(*observation.shape[:-1], 2)


def torchrl(source: str = "own") -> Any:
    envs = pytest.importorskip("torchrl.envs")
    return envs.GymWrapper(Drawn(source))


def torchrl_batch(source: str = "own") -> Any:
    envs = pytest.importorskip("torchrl.envs")
    return envs.SerialEnv(2, partial(torchrl, source))


def vector(source: str = "own") -> Any:
    return gymnasium.vector.SyncVectorEnv([partial(Drawn, source)] * 2)


def drawn_by_caller() -> str:
    return str((torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()))


SOURCES = ["own", "numpy", "random", "torch"]


# What draws is that of the process, whatever the environment's kind.
@pytest.mark.parametrize(
    ("make", "source"),
    [
        *((Drawn, source) for source in SOURCES),
        (vector, "own"),
        (torchrl, "torch"),
        *((torchrl_batch, source) for source in ("numpy", "random")),
    ],
)
def test_episodes_of_a_seed_begin_equally_whatever_the_policy(make: Any, source: str) -> None:
    before = drawn_by_caller()
    with Evaluator(partial(make, source), Always(0), num_trajectories=5) as evaluator:
        found = [evaluator.evaluate_episodes(Always(i), seed=3) for i in (0, 1, 0)]
        other = evaluator.evaluate_episodes(seed=4)
        assert evaluator.state_dict() == {"step_counter": 0}
        compared = evaluator.compare(Always(0), Always(1))
    first, second, third = found
    assert first.batch_size == (5,)
    names = ("env_index", "episode_length", "episode_reward", "truncated")
    dtypes = [torch.int64, torch.int64, torch.float32, torch.bool]
    assert [first[name].dtype for name in names] == dtypes
    assert first["episode_length"].tolist() == [2] * 5
    assert second["episode_length"].tolist() == [5] * 5
    assert torch.equal(first["episode_reward"], second["episode_reward"])
    assert (first == third).all()
    assert not torch.equal(first["episode_reward"], other["episode_reward"])
    assert len(set(first["episode_reward"].tolist())) == 5
    assert compared.difference == 0.0
    assert drawn_by_caller() == before


def test_episodes_are_the_same_on_another_backend() -> None:
    results = []
    for options in ({}, {"backend": "process"}, {"backend": "process", "num_workers": 2}):
        for make in (Drawn, vector) if "num_workers" not in options else (Drawn,):
            with Evaluator(make, Always(1), num_trajectories=3, **options) as evaluator:
                results.append((make, evaluator.evaluate_episodes(seed=3)))
    for make in (Drawn, vector):
        first, *others = (one["episode_reward"] for kind, one in results if kind is make)
        assert all(torch.equal(first, other) for other in others)


def test_truncated_episodes_and_indices_of_environments() -> None:
    makers = [partial(Drawn, length=4), partial(Drawn, length=9)]
    with Evaluator(makers, Always(0), num_trajectories=5, max_steps=6) as evaluator:
        found = evaluator.evaluate_episodes()
        assert found["env_index"].tolist() == [0, 1, 0, 1, 0]
        assert found["episode_length"].tolist() == [4, 6, 4, 6, 4]
        assert found["truncated"].tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_the_first_episodes_that_end(backend: str) -> None:
    makers = [partial(Drawn, length=2), partial(Drawn, length=9)]
    arguments = {"num_trajectories": 4, "frames_per_batch": 6, "backend": backend}
    with Evaluator(makers, Always(0), episode_sampling="first_done", **arguments) as evaluator:
        episodes = evaluator.evaluate().episodes
        assert (episodes.lengths.tolist(), episodes.env_index.tolist()) == ([2] * 4, [0] * 4)
        # Single episodes are always those of each environment.
        assert evaluator.evaluate_episodes()["env_index"].tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="episode_sampling must be 'first_done' or 'per_env'"):
        Evaluator(Drawn, Always(0), episode_sampling="all")  # type: ignore[arg-type]


def test_callbacks_are_not_called_for_single_episodes() -> None:
    called: list[Any] = []
    callbacks = {"on_result": called.append, "metrics_fn": lambda _: called.append(0) or {}}
    with Evaluator(Drawn, Always(0), num_trajectories=2, **callbacks) as evaluator:
        evaluator.evaluate_episodes()
        assert not called
        with pytest.raises(ValueError, match="seed must not be negative"):
            evaluator.evaluate_episodes(seed=-1)
        with pytest.raises(TypeError, match="seed must be an integer"):
            evaluator.evaluate_episodes(seed=1.5)  # type: ignore[arg-type]


def test_single_episodes_wait_for_no_pending_evaluation() -> None:
    with Evaluator(Drawn, Always(0), num_trajectories=2000) as evaluator:
        evaluator.trigger_eval()
        with pytest.raises(RuntimeError, match=r"evaluate_episodes\(\) can't be called while"):
            evaluator.evaluate_episodes()


# --- estimates


def test_estimates_of_each_row() -> None:
    result = bootstrap_estimate(RETURNS)
    assert result.batch_size == (2,)
    assert result["estimate"].tolist() == [0, 5]
    assert result["ci_low"][1] == result["ci_high"][1] == 5
    assert bootstrap_estimate(RETURNS, 0).batch_size == (4,)
    means = bootstrap_estimate(RETURNS.double(), statistic="mean")
    assert (means["estimate"].tolist(), means["estimate"].dtype) == ([25, 5], torch.float32)
    assert means["ci_low"][0] < 25 < means["ci_high"][0]
    medians = bootstrap_estimate(torch.tensor([1, 2, 4, 9]), statistic="median")
    assert medians["estimate"] == 3


def test_a_generator_repeats_the_interval() -> None:
    def drawn(seed: int, **options: Any) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return bootstrap_estimate(torch.arange(9), generator=generator, **options)

    before = torch.get_rng_state()
    assert (drawn(1, num_resamples=20) == drawn(1, num_resamples=20)).all()
    assert not (drawn(1, num_resamples=20) == drawn(2, num_resamples=20)).all()
    assert torch.equal(before, torch.get_rng_state())
    narrow, wide = (drawn(0, confidence=share) for share in (0.5, 0.99))
    assert wide["ci_low"] < narrow["ci_low"] < narrow["ci_high"] < wide["ci_high"]


def test_paired_samples_are_compared_by_their_differences() -> None:
    first = torch.tensor([3.0, 5.0, 4.0, 6.0])
    result = paired_comparison(first, torch.tensor([2.0, 5.0, 4.0, 7.0]))
    assert result["estimate"] == 0
    assert result["probability_of_improvement"] == 0.5
    assert paired_comparison(first, first - 1)["ci_low"] == 1
    with pytest.raises(ValueError, match=r"same shape, but their shapes are \(2, 4\) and \(4,\)"):
        paired_comparison(RETURNS, RETURNS[0])


@pytest.mark.parametrize(
    ("values", "options", "error", "message"),
    [
        (RETURNS, {"statistic": "max"}, ValueError, "statistic must be .* 'max'"),
        (RETURNS, {"confidence": 1.0}, ValueError, "confidence must be between 0 and 1"),
        (RETURNS, {"confidence": 0}, ValueError, "confidence must be between 0 and 1"),
        (RETURNS, {"confidence": "0.9"}, TypeError, "confidence must be a number"),
        (RETURNS, {"num_resamples": 0}, ValueError, "num_resamples must be at least 1"),
        (RETURNS, {"num_resamples": 2.5}, TypeError, "num_resamples must be an integer"),
        (RETURNS, {"dim": 2}, IndexError, "dim must be a dimension of values"),
        (RETURNS, {"dim": "x"}, TypeError, "dim must be an integer"),
        ([1.0], {}, TypeError, "values must be a tensor of real numbers, but it is list"),
        (torch.zeros(0), {}, ValueError, "values must have at least one sample"),
        (torch.tensor(1.0), {}, IndexError, "dim must be a dimension of values"),
    ],
)
def test_wrong_samples_and_options_are_refused(
    values: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        bootstrap_estimate(values, **options)


def test_estimates_are_those_of_torchrl() -> None:
    theirs = pytest.importorskip("torchrl.collectors")
    if not hasattr(theirs, "bootstrap_estimate"):
        pytest.skip("this TorchRL has no estimates")
    for statistic in ("iqm", "mean", "median"):
        for values in (torch.rand(3, 7), torch.rand(5, 1), torch.arange(10)):
            given = {"statistic": statistic, "num_resamples": 50}
            ours, other = (
                module(values, **given, generator=torch.Generator().manual_seed(1))
                for module in (bootstrap_estimate, theirs.bootstrap_estimate)
            )
            torch.testing.assert_close(ours.to_dict(), other.to_dict())
