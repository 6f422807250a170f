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

from tests.oracle.cases import Case
from tests.oracle.comparing import check
from trawl.collectors import Collector, Evaluator, NormalizeObservation, NormalizeReward
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
    "late_same_step": {"max_frames_per_traj": 3},
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

PLACES = Box(-float("inf"), float("inf"), (2,))


class Changed:
    """Simulator whose observations are made of its place, which it changes in place.

    Args:
        change: function of the place.
        space: space of an observation.
        dtype: dtype of its place.
    """

    num_envs = 4
    device = "cpu"
    single_action_space: Any = Box(-1, 1, (1,))

    def __init__(
        self,
        change: Any = lambda place: place,
        space: Any = PLACES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.change, self.single_observation_space = change, space
        self.unwrapped, self.metadata = self, {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.place = torch.zeros(self.num_envs, 2, dtype=dtype)
        self.age = torch.zeros(self.num_envs)

    def _restart(self, mask: Tensor) -> None:
        self.place[mask] = -50
        self.age[mask] = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._restart(torch.ones(self.num_envs, dtype=torch.bool))
        return self.change(self.place), {}

    def step(self, action: Tensor) -> Any:
        self.age += 1
        self.place += torch.arange(1, 1 + self.num_envs).unsqueeze(-1)
        ended = self.age >= torch.arange(2, 2 + self.num_envs)
        info = {"final_obs": self.change(self.place.clone())}
        reward = self.place[:, 0].clone()
        self._restart(ended)
        return self.change(self.place), reward, ended, ended & False, info

    def close(self) -> None:
        pass


class Still(Changed):
    """Simulator in which nothing changes, and no reward is given."""

    def step(self, action: Tensor) -> Any:
        ended = torch.zeros(self.num_envs, dtype=torch.bool)
        return self.place, torch.zeros(self.num_envs), ended, ended, {"final_obs": self.place}


class StillArray(gymnasium.Env[Any, Any]):
    """The same as an environment of arrays."""

    action_space = Still.single_action_space

    def __init__(self, value: Any) -> None:
        self.place = value
        self.observation_space = Box(-100, 100, value.shape, value.dtype.type)
        self.single_observation_space = self.observation_space

    def reset(self, **kwargs: Any) -> Any:
        return self.place, {}

    def step(self, action: Any) -> Any:
        return self.place, 0.0, False, False, {}


def of_dtype(dtype: torch.dtype) -> Changed:
    space = Box(-100, 100, (2,), np.float64 if dtype is torch.float64 else np.float16)
    return Changed(space=space, dtype=dtype)


EXTREME = {
    "normalize_observations": NormalizeObservation(epsilon=1e-80, clip=1e300),
    "normalize_rewards": NormalizeReward(epsilon=1e-80, clip=1e300),
}
SMALL = {"normalize_observations": NormalizeObservation(epsilon=1e-12)}
LARGE = {"normalize_observations": NormalizeObservation(clip=1e6)}
STACK = {"frame_stack": 3}
STILL = Still()
STILL_ARRAY = StillArray(np.full(2, -50, np.float32))
NETWORK, FLAGS = Changed(nn.Linear(2, 2)), Changed(lambda place: place > -49)
EMPTY = Changed(lambda place: place[:, :0], Box(-1, 1, (0,)))
EMPTY_ARRAY = StillArray(np.zeros(0, np.float32))
ODD: list[tuple[Any, list[dict[str, Any]]]] = [
    (NETWORK, [{}, BOTH, STACK]),
    (FLAGS, [BOTH]),
    (EMPTY, [BOTH, STACK]),
    (EMPTY_ARRAY, [BOTH, STACK]),
    (STILL, [EXTREME]),
    (STILL_ARRAY, [EXTREME]),
    (StillArray(np.zeros(2, np.float16)), [SMALL, LARGE]),
    (of_dtype(torch.float16), [SMALL]),
    (of_dtype(torch.bfloat16), [SMALL]),
    (of_dtype(torch.float64), [SMALL]),
]


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize(
    ("source", "options"),
    [(source, options) for source, each in ODD for options in each],
    ids=[*map(str, range(sum(len(each) for _, each in ODD)))],
)
def test_odd_observations_become_finite_numbers(source: Any, options: dict[str, Any]) -> None:
    options = {"frames_per_batch": 40, "reset_at_each_iter": source is NETWORK, **options}
    with Collector(source, **options) as collector:
        batches = [collector.next() for _ in range(2)]
        found = collector.normalization
        if source is NETWORK:
            rows = collector.parts.loop.rollout.writer.state_dict()["rows"].values()
            # Otherwise, the graphs of all resets would stay in memory.
            assert not any(row.requires_grad for row in rows)
    for batch in batches:
        assert batch["observation"].isfinite().all()
        assert batch["next", "observation"].isfinite().all()
        assert batch["observation"].shape[-1] == source.single_observation_space.shape[-1]
        assert source is FLAGS or batch["observation"].itemsize == source.place.itemsize
        assert not any(value.requires_grad for value in batch.values(True, True))
    if found is not None:
        moments = found.observations["observation"]
        assert moments.count == 80
        assert source is not FLAGS or all(0 < share < 1 for share in moments.mean)
    if source in (STILL, STILL_ARRAY):
        # What never changes is normalised to zero.
        assert not batch["next", "reward"].any()
        assert not batch["next", "observation"].any()
        assert not found.normalize_observation(torch.full((1, 2), -50.0)).any()
