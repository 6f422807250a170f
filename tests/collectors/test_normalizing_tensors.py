"""Environments of tensors are normalised as those of arrays are."""

import itertools
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensor_parts import COUNT, State, on_numpy, on_torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from trawl.collectors import (
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
    NormalizeObservation,
    NormalizeReward,
)
from trawl.rollout import tensor_normalizer
from trawl.rollout.moments import RunningMoments
from trawl.rollout.normalization import Normalization
from trawl.testing import NumberedTorchEnv

MASK = ("collector", "mask")
BOTH: dict[str, Any] = {
    "normalize_observations": True,
    "normalize_rewards": NormalizeReward(gamma=0.9, keep_raw=True),
}


class Greedy(nn.Linear):
    def forward(self, observation: Tensor) -> Tensor:
        return nn.functional.one_hot(super().forward(observation).argmax(-1), 4)


def network() -> Any:
    torch.manual_seed(0)
    return TensorDictModule(Greedy(5, 4), in_keys=["observation"], out_keys=["action"])


def assert_close(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert one.batch_size == other.batch_size
        mask = one.get(MASK, torch.ones(one.batch_size, dtype=torch.bool))
        for key in one.keys(True, True):
            # Rows without a frame may have any values.
            x, y = (part[key] if key == MASK else part[key][mask] for part in (one, other))
            assert x.dtype is y.dtype
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


def assert_equal_statistics(found: Normalization, expected: Normalization) -> None:
    one, other = found.share().statistics, expected.share().statistics
    assert one.keys() == other.keys()
    for key, moments in one.items():
        assert moments.count == other[key].count > 0
        np.testing.assert_allclose(moments.mean, other[key].mean, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(moments.var, other[key].var, rtol=1e-10, atol=1e-12)


def batches(env: Any, policy: Any, count: int = 5, **options: Any) -> tuple[list[Any], Any]:
    options = {"frames_per_batch": 8 * COUNT, **BOTH, **options}
    with Collector(env, policy, **options) as collector:
        collector.set_seed(3)
        found = [batch.clone() for batch in itertools.islice(collector, count)]
        return found, collector.normalization


@pytest.fixture(params=[1, 30, None], ids=["one row", "two rows", "all rows"])
def _kept(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets how many values are kept until they are counted, which depends on the cache."""
    if request.param is not None:
        monkeypatch.setattr(tensor_normalizer, "_KEPT_CPU", request.param)


CASES: dict[str, dict[str, Any]] = {
    "limit": {"max_frames_per_traj": 2},
    "exact": {"exact_frames": True, "total_frames": 65},
    "one step": {"frames_per_batch": COUNT},
    "clip": {"normalize_observations": NormalizeObservation(clip=0.5, epsilon=0.1)},
}


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize(
    ("mode", "case"),
    [
        (AutoresetMode.NEXT_STEP, "exact"),
        (AutoresetMode.SAME_STEP, "limit"),
        (AutoresetMode.DISABLED, "one step"),
        (AutoresetMode.DISABLED, "clip"),
    ],
)
def test_rows_can_be_counted_one_by_one(mode: AutoresetMode, case: str) -> None:
    make = State if case == "limit" else network
    expected, old = batches(on_numpy(mode), make(), **CASES[case])
    found, new = batches(on_torch(mode), make(), **CASES[case])
    assert_close(found, expected)
    assert_equal_statistics(new, old)


def test_statistics_can_be_frozen() -> None:
    with Collector(on_torch(AutoresetMode.SAME_STEP), frames_per_batch=24, **BOTH) as collector:
        collector.next()
        normalization = collector.normalization
        assert normalization is not None
        before = normalization.observations["observation"]
        normalization.training = False
        batch = collector.next()
        assert normalization.observations["observation"] is before
        values = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0]) * torch.ones(1, 5)
        assert normalization.normalize_observation(values).shape == (1, 5)
        assert batch["observation"].abs().max() <= 10
        normalization.training = True
        collector.next()
        assert normalization.observations["observation"].count == 48


# --- workers and states


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_share_statistics(kind: Any) -> None:
    workers = 2 if kind is MultiSyncCollector else 1
    found, statistics = [], []
    for make in (on_torch, on_numpy):
        envs = [partial(make, AutoresetMode.SAME_STEP)] * workers
        options = {"frames_per_batch": 24, "total_frames": 96, "start_method": "inline", **BOTH}
        collector = kind(envs, network(), **options)
        try:
            collector.set_seed(0)
            found.append([batch.clone() for batch in collector])
            statistics.append(collector.normalization)
        finally:
            collector.shutdown()
    assert_close(*found)
    assert_equal_statistics(*statistics)
    assert statistics[0].observations["observation"].count == 96


# --- other kinds of environments


def test_several_environments_of_tensors_share_statistics() -> None:
    makers = [partial(on_torch, AutoresetMode.SAME_STEP)] * 2
    with Collector(makers, frames_per_batch=12, **BOTH) as collector:
        for _ in range(3):
            batch = collector.next()
        assert collector.normalization is not None
        assert collector.normalization.observations["observation"].count == 3 * batch.numel()
    assert batch["observation"].abs().max() <= 10


class Infinite(NumberedTorchEnv):
    def step(self, actions: Any) -> Any:
        obs, *rest, info = super().step(actions)
        return torch.full_like(obs, float("inf")), *rest, info


def test_infinite_values_are_an_error() -> None:
    with (
        Collector(Infinite(COUNT, [100]), frames_per_batch=12, **BOTH) as collector,
        pytest.raises(ValueError, match="has values that are not finite"),
    ):
        collector.next()


class Normalized(nn.Module):
    """Policy that requires normalised observations, except in its first call."""

    calls = 0

    def forward(self, observation: Tensor) -> Tensor:
        self.calls += 1
        # The number of the last environment is 2.
        if self.calls > 1 and observation[:, 0].max() == 2:
            raise ValueError("not normalised")
        return nn.functional.one_hot(torch.zeros(len(observation)).long(), 4)


def test_evaluations_use_the_statistics() -> None:
    make = partial(NumberedTorchEnv, COUNT, [4])
    policy = TensorDictModule(Normalized(), in_keys=["observation"], out_keys=["action"])
    with Collector(make, network(), frames_per_batch=24, **BOTH) as collector:
        collector.next()
        statistics = collector.normalization
        assert statistics is not None
        with Evaluator(make, policy, num_trajectories=COUNT, normalization=statistics) as evaluator:
            evaluator.evaluate()
        assert statistics.observations["observation"].count == 24
    with (
        Evaluator(make, policy, num_trajectories=COUNT) as evaluator,
        pytest.raises(ValueError, match="not normalised"),
    ):
        evaluator.evaluate()


def test_vmas_has_statistics_of_its_groups() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gym, which VMAS imports, warns about itself.
        vmas = pytest.importorskip("vmas")
    found: dict[bool, list[Any]] = {}
    for normalized in (False, True):
        options = BOTH if normalized else {}
        # Random actions don't depend on the observations.
        env = vmas.make_env("balance", num_envs=4, max_steps=7, seed=0)
        with Collector(env, frames_per_batch=40, **options) as collector:
            collector.set_seed(0)
            found[normalized] = [collector.next().clone() for _ in range(3)]
            normalization = collector.normalization
    raw, own = found[False], found[True]
    assert normalization is not None
    observed = normalization.observations["agents", "observation"]
    rewards = normalization.rewards["agents", "reward"]
    seen = torch.cat([b["agents", "observation"].flatten(0, 1) for b in raw]).numpy()
    expected = RunningMoments.of(seen)
    assert observed.count == len(seen) == 120
    assert observed.mean.shape == seen.shape[1:]
    np.testing.assert_allclose(observed.mean, expected.mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(observed.var, expected.var, rtol=1e-7, atol=1e-12)
    assert rewards.count == 120 * seen.shape[1]
    for one, other in zip(own, raw, strict=True):
        assert torch.equal(one["next", "agents", "raw_reward"], other["next", "agents", "reward"])
        assert torch.equal(one["agents", "info", "pos_rew"], other["agents", "info", "pos_rew"])
