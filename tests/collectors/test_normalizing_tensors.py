"""Environments of tensors are normalised as those of arrays are."""

import itertools
import warnings
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.spaces import Dict as DictSpace
from gymnasium.vector import AutoresetMode
from tensor_parts import COUNT, State, every_third, on_numpy, on_torch
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
from trawl.envs import TorchVectorEnv
from trawl.rollout import normalized_steps
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
        monkeypatch.setattr(normalized_steps, "_KEPT_CPU", request.param)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "observations": {"normalize_rewards": False},
    "rewards": {"normalize_observations": False},
    "limit": {"max_frames_per_traj": 2},
    "reset": {"reset_at_each_iter": True},
    "compact": {"compact_obs": True},
    "exact": {"exact_frames": True, "total_frames": 65},
    "one step": {"frames_per_batch": COUNT},
    "clip": {"normalize_observations": NormalizeObservation(clip=0.5, epsilon=0.1)},
    "truncated": {"set_truncated": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_batches_and_statistics_are_those_of_arrays(mode: AutoresetMode, case: str) -> None:
    if case == "limit" and mode is AutoresetMode.NEXT_STEP:
        pytest.skip("an environment that resets itself in its next step can't be cut off")
    for policy in (network, State):
        expected, old = batches(on_numpy(mode), policy(), **CASES[case])
        found, new = batches(on_torch(mode), policy(), **CASES[case])
        assert_close(found, expected)
        assert_equal_statistics(new, old)


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("case", ["plain", "limit", "one step", "exact"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_rows_can_be_counted_one_by_one(mode: AutoresetMode, case: str) -> None:
    if case == "limit" and mode is AutoresetMode.NEXT_STEP:
        case = "reset"
    expected, old = batches(on_numpy(mode), network(), **CASES[case])
    found, new = batches(on_torch(mode), network(), **CASES[case])
    assert_close(found, expected)
    assert_equal_statistics(new, old)


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("mode", AutoresetMode)
def test_interrupted_batches(mode: AutoresetMode) -> None:
    expected, old = batches(on_numpy(mode), network(), interruptor=every_third())
    found, new = batches(on_torch(mode), network(), interruptor=every_third())
    assert_close(found, expected)
    assert_equal_statistics(new, old)


def test_each_value_is_normalised_once() -> None:
    found, _ = batches(on_torch(AutoresetMode.SAME_STEP), network())
    for batch in found:
        goes_on = ~batch["next", "done"][:, :-1, 0]
        after, before = batch["next", "observation"][:, :-1], batch["observation"][:, 1:]
        assert torch.equal(after[goes_on], before[goes_on])
    for one, other in itertools.pairwise(found):
        goes_on = ~one["next", "done"][:, -1, 0]
        after, before = one["next", "observation"][:, -1], other["observation"][:, 0]
        assert torch.equal(after[goes_on], before[goes_on])


def test_single_environments_are_reset_between_batches() -> None:
    found = []
    for env in (on_numpy(AutoresetMode.DISABLED), on_torch(AutoresetMode.DISABLED)):
        with Collector(env, network(), frames_per_batch=9, **BOTH) as collector:
            collector.next()
            collector._rollout.reset(np.array([True, False, True]))
            found.append([collector.next().clone()])
    assert_close(*found)


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


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_state_resumes_to_the_bit(mode: AutoresetMode, tmp_path: Any) -> None:
    options = {"frames_per_batch": 8 * COUNT, **BOTH}
    with (
        Collector(on_torch(mode), network(), **options) as collector,
        Collector(on_torch(mode), network(), **options) as other,
    ):
        collector.set_seed(1)
        other.next()
        collector.next()
        torch.save(collector.state_dict(), tmp_path / "state.pt")
        expected = [collector.next().clone() for _ in range(3)]
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for batch in expected:
            assert (other.next() == batch).all()
        one, two = collector.normalization, other.normalization
        assert one is not None
        assert two is not None
        assert str(one.state_dict()) == str(two.state_dict())


# --- environments with other habits


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
@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
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
            writer = collector._rollout.writer
            # Otherwise, the graphs of all resets would stay in memory.
            assert not any(row.requires_grad for row in writer._saved_rows().values())


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


class Parts(InPlace):
    """Simulator with a dictionary of observations."""

    single_observation_space = DictSpace(
        a=Box(-float("inf"), float("inf"), (2,)),
        b=Box(-float("inf"), float("inf"), (1,)),
        image=Box(0, 255, (2, 2), np.uint8),
    )

    def shown(self, obs: Tensor) -> Any:
        image = torch.ones(self.num_envs, 2, 2, dtype=torch.uint8)
        return {"a": obs, "b": obs[:, :1] * 3, "image": image}

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return self.shown(obs), info

    def step(self, action: Tensor) -> Any:
        obs, *rest, info = super().step(action)
        return self.shown(obs), *rest, {"final_obs": self.shown(info["final_obs"])}


def test_keys_choose_observations() -> None:
    options: dict[str, Any] = {"frames_per_batch": 40}
    found = []
    for chosen in (True, NormalizeObservation(keys=["b"]), False):
        env = Parts(AutoresetMode.SAME_STEP)
        with Collector(env, normalize_observations=chosen, **options) as collector:
            found.append([collector.next().clone() for _ in range(2)][-1])
            normalization = collector.normalization
            if chosen is True:
                assert normalization is not None
                assert list(normalization.observations) == ["a", "b"]
    both, one, raw = found
    assert torch.equal(one["a"], raw["a"])
    assert torch.equal(one["b"], both["b"])
    assert torch.equal(both["image"], raw["image"])
    assert both["next", "a"].abs().max() < 10 < raw["next", "a"].abs().max()


@pytest.mark.parametrize(
    ("env", "options", "error", "text"),
    [
        (Parts, {"keys": ["x"]}, KeyError, "the key 'x', but the observations are"),
        (Parts, {"keys": ["image"]}, ValueError, "'image', but its dtype is torch.uint8"),
    ],
)
def test_mistakes_are_named(env: Any, options: Any, error: Any, text: str) -> None:
    chosen = NormalizeObservation(**options)
    with pytest.raises(error, match=text):
        Collector(env(AutoresetMode.SAME_STEP), frames_per_batch=8, normalize_observations=chosen)


def test_several_environments_of_tensors_are_refused() -> None:
    makers = [partial(on_torch, AutoresetMode.SAME_STEP)] * 2
    with pytest.raises(ValueError, match=r"normalize_observations .* it is a list of environments"):
        Collector(makers, frames_per_batch=12, normalize_observations=True)


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


# --- other kinds of environments


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
