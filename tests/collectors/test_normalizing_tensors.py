"""Environments of tensors are normalised as those of arrays are, also by odd simulators."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from tests.oracle.comparing import Case, check
from trawl.collectors import Collector, Evaluator, NormalizeObservation, NormalizeReward
from trawl.envs import TorchVectorEnv
from trawl.rollout.moments import RunningMoments
from trawl.rollout.stages import normalizers
from trawl.testing import NumberedEnv, NumberedTorchEnv
from trawl.testing.oracle import Options

COUNT = 3
BOTH: dict[str, Any] = {
    "normalize_observations": True,
    "normalize_rewards": NormalizeReward(gamma=0.9, keep_raw=True),
}


@pytest.fixture(params=[1, 30, None], ids=["one row", "two rows", "all rows"])
def _kept(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets how many values are kept until they are counted, which depends on the cache."""
    if request.param is not None:
        monkeypatch.setattr(normalizers, "_KEPT_CPU", request.param)


SEVERAL: dict[str, dict[str, Any]] = {
    "tensors_same_step": {"frames_per_batch": 3, "recurrent": True},
    "tensors_next_step": {"exact_frames": True, "total_frames": 65},
    "tensors_disabled": {"max_frames_per_traj": 2},
    "source_tensors": {"clip": 0.5},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("face", SEVERAL)
def test_rows_can_be_counted_one_by_one(face: str) -> None:
    both = {"normalize_observations": True, "normalize_rewards": True, "keep_raw": True}
    options = Options(**{"frames_per_batch": 24, **both, **SEVERAL[face]})
    check(Case(face, options, policy="recurrent" if options.recurrent else "module"))


@pytest.mark.parametrize("make", [NumberedEnv, partial(NumberedTorchEnv, COUNT)])
def test_statistics_can_be_frozen(make: Any) -> None:
    with Collector(make, frames_per_batch=24, **BOTH) as collector:
        collector.next()
        normalization: Any = collector.normalization
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


class InfiniteArray(NumberedEnv):
    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return np.full_like(obs, np.inf), np.inf, *rest[1:]


class Infinite(NumberedTorchEnv):
    def step(self, actions: Any) -> Any:
        obs, *rest, info = super().step(actions)
        return torch.full_like(obs, float("inf")), *rest, info


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (InfiniteArray, "normalize_observations"),
        (InfiniteArray, "normalize_rewards"),
        (partial(Infinite, COUNT, [100]), "normalize_observations"),
    ],
)
def test_infinite_values_are_an_error(make: Any, name: str) -> None:
    with (
        Collector(make, frames_per_batch=12, **{name: True}) as collector,
        pytest.raises(ValueError, match="values that are not finite, so it can't be normalised"),
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
    with Collector(make, None, frames_per_batch=24, **BOTH) as collector:
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


# --- odd simulators


class InPlace:
    """Simulator that returns the same tensor each time, which it changes in place."""

    num_envs = 4
    device = "cpu"
    single_observation_space: Any = Box(-float("inf"), float("inf"), (2,))
    single_action_space: Any = Box(-1, 1, (1,))

    def __init__(self, mode: AutoresetMode, dtype: torch.dtype = torch.float32) -> None:
        self.unwrapped, self.mode = self, mode
        self.metadata = {"autoreset_mode": mode}
        self.place = torch.zeros(self.num_envs, 2, dtype=dtype)
        self.age = torch.zeros(self.num_envs)

    def _restart(self, mask: Tensor) -> None:
        self.place[mask] = -50
        self.age[mask] = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        every = torch.ones(self.num_envs, dtype=torch.bool)
        self._restart((options or {}).get("reset_mask", every))
        return self.place, {}

    def step(self, action: Tensor) -> Any:
        self.age += 1
        self.place += torch.arange(1, 1 + self.num_envs).unsqueeze(-1)
        ended = self.age >= torch.arange(2, 2 + self.num_envs)
        info = {"final_obs": self.place.clone()}
        reward = self.place[:, 0].clone()
        if self.mode is AutoresetMode.SAME_STEP:
            self._restart(ended)
        return self.place, reward, ended, ended & False, info

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize(
    ("mode", "limit"), [(AutoresetMode.SAME_STEP, 3), (AutoresetMode.DISABLED, None)]
)
def test_observations_that_change_in_place(mode: AutoresetMode, limit: int | None) -> None:
    found: dict[bool, list[Any]] = {}
    for normalized in (False, True):
        with Collector(
            TorchVectorEnv(InPlace(mode), partial_reset="mask"),
            frames_per_batch=40,
            max_frames_per_traj=limit,
            normalize_observations=normalized,
        ) as collector:
            found[normalized] = [collector.next().clone() for _ in range(3)]
            normalization = collector.normalization
    assert normalization is not None
    raw, own = found[False], found[True]
    seen = torch.cat([batch["observation"].reshape(-1, 2) for batch in raw]).numpy()
    moments = normalization.observations["observation"]
    assert moments.count == len(seen)
    np.testing.assert_allclose(moments.mean, RunningMoments.of(seen).mean, rtol=1e-12)
    # The frames of the last batch have the statistics of the batches before it.
    before = RunningMoments.of(seen[: 2 * 40])
    mean, scale = before.affine(1e-8)
    for key, first in (("observation", 1), (("next", "observation"), 0)):
        expected = np.clip((raw[2][key].numpy() - mean) * scale, -10, 10)[:, first:]
        np.testing.assert_allclose(own[2][key].numpy()[:, first:], expected, rtol=1e-4, atol=1e-4)


class Learned(InPlace):
    """Simulator whose observations come from a network."""

    def __init__(self) -> None:
        super().__init__(AutoresetMode.SAME_STEP)
        self.network = nn.Linear(2, 2)

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return self.network(obs), info

    def step(self, action: Tensor) -> Any:
        obs, *rest, info = super().step(action)
        return self.network(obs), *rest, {"final_obs": self.network(info["final_obs"])}


@pytest.mark.parametrize("options", [{}, BOTH, {"frame_stack": 2}], ids=["plain", "both", "stack"])
def test_observations_of_a_network_need_no_gradients(options: Any) -> None:
    options = {"frames_per_batch": 40, "reset_at_each_iter": True, **options}
    with Collector(Learned(), **options) as collector:
        for _ in range(2):
            batch = collector.next()
            assert not any(value.requires_grad for value in batch.values(True, True))
            writer = collector.parts.loop.rollout.writer
            # Otherwise, the graphs of all resets would stay in memory.
            assert not any(row.requires_grad for row in writer.state_dict()["rows"].values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_all_floating_point_dtypes(dtype: torch.dtype) -> None:
    class Other(InPlace):
        single_observation_space = Box(
            -100, 100, (2,), np.float64 if dtype is torch.float64 else np.float16
        )

    env = TorchVectorEnv(Other(AutoresetMode.SAME_STEP, dtype))
    options = NormalizeObservation(epsilon=1e-12)
    with Collector(env, frames_per_batch=40, normalize_observations=options) as collector:
        for _ in range(2):
            batch = collector.next()
            assert batch["observation"].isfinite().all()
            assert batch["next", "observation"].isfinite().all()
        assert collector.normalization is not None
        assert collector.normalization.observations["observation"].count == 80
    assert batch["observation"].itemsize == dtype.itemsize


class Still(InPlace):
    """Simulator in which nothing changes, and no reward is given."""

    def step(self, action: Tensor) -> Any:
        ended = torch.zeros(self.num_envs, dtype=torch.bool)
        return self.place, torch.zeros(self.num_envs), ended, ended, {"final_obs": self.place}


class StillArray(gymnasium.Env[Any, Any]):
    observation_space = Still.single_observation_space
    action_space = Still.single_action_space

    def reset(self, **kwargs: Any) -> Any:
        return np.full(2, -50, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.full(2, -50, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("make", [StillArray, lambda: Still(AutoresetMode.SAME_STEP)])
def test_extreme_options_give_finite_values(make: Any) -> None:
    extreme = {"epsilon": 1e-80, "clip": 1e300}
    options = {
        "normalize_observations": NormalizeObservation(**extreme),
        "normalize_rewards": NormalizeReward(**extreme),
    }
    with Collector(make(), frames_per_batch=40, **options) as collector:
        for _ in range(2):
            batch = collector.next()
            assert not batch["next", "reward"].any()
        assert not batch["next", "observation"].any()
        assert collector.normalization is not None
        values = torch.tensor([[-50.0, -50.0]])
        assert not collector.normalization.normalize_observation(values).any()


class Flags(InPlace):
    """Simulator whose observations are flags, although its space has numbers."""

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return obs > -49, info

    def step(self, action: Tensor) -> Any:
        obs, *rest, info = super().step(action)
        return obs > -49, *rest, {"final_obs": info["final_obs"] > -47}


@pytest.mark.usefixtures("_kept")
def test_flags_are_normalised_as_numbers() -> None:
    with Collector(Flags(AutoresetMode.SAME_STEP), frames_per_batch=40, **BOTH) as collector:
        for _ in range(2):
            batch = collector.next()
        assert collector.normalization is not None
        found = collector.normalization.observations["observation"]
    assert batch["next", "observation"].isfinite().all()
    assert found.count == 80
    assert all(0 < share < 1 for share in found.mean)


class Empty(InPlace):
    """Simulator without observations."""

    single_observation_space = Box(-1, 1, (0,))

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return obs[:, :0], info

    def step(self, action: Tensor) -> Any:
        obs, *rest, info = super().step(action)
        return obs[:, :0], *rest, {"final_obs": info["final_obs"][:, :0]}


class EmptyArray(StillArray):
    observation_space = Empty.single_observation_space

    def reset(self, **kwargs: Any) -> Any:
        return np.zeros(0, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(0, np.float32), 1.0, False, True, {}


@pytest.mark.parametrize("options", [BOTH, {"frame_stack": 3}], ids=["normalised", "stacked"])
@pytest.mark.parametrize("make", [EmptyArray, lambda: Empty(AutoresetMode.SAME_STEP)])
def test_observations_without_elements(make: Any, options: Any) -> None:
    with Collector(make(), frames_per_batch=40, **options) as collector:
        for _ in range(2):
            batch = collector.next()
    assert batch["observation"].shape == batch["next", "observation"].shape
    assert batch["observation"].shape[-1] == 0
