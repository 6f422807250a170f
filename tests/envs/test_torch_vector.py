"""Recognition of vector environments whose data are torch tensors, and errors of their adapter."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from trawl.collectors import Collector
from trawl.envs import GymEnv, TorchVectorEnv
from trawl.testing import NumberedEnv, NumberedTorchEnv, SelfResettingVectorEnv


class Bare:
    """Environment without a device, whose observations have an array and a tensor."""

    num_envs = 2
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium
    single_observation_space = Dict(a=Box(0, 9, (1,)), b=Dict(c=Box(0, 9, (1,))))
    single_action_space = Discrete(2)

    def __init__(self) -> None:
        self.unwrapped = self
        self.resets = 0

    def shown(self) -> Any:
        value = torch.full((2, 1), float(self.resets))
        return {"a": value, "b": {"c": value + 0.5}}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.resets += 1
        return self.shown(), {}

    def step(self, action: Any) -> Any:
        no = torch.zeros(2, dtype=torch.bool)
        return self.shown(), torch.ones(2), no, no, {}

    def close(self) -> None:
        pass


class Derived(Bare, VectorEnv):  # type: ignore[type-arg,misc]
    """The same as a class of Gymnasium, with a tensor among its attributes."""

    def __init__(self) -> None:
        self.resets = 0
        self.weights = torch.zeros(1)


class Arrays(Bare):
    def shown(self) -> Any:
        value = np.full((2, 1), 1.0, np.float32)
        return {"a": value, "b": {"c": value}}


class Mixed(Bare):
    def shown(self) -> Any:
        found = super().shown()
        return {"a": found["a"].numpy(), "b": found["b"]}


@pytest.mark.parametrize(("kind", "wrap"), [(Bare, False), (Derived, False), (Derived, True)])
def test_a_reset_tells(kind: Any, wrap: bool) -> None:
    env = VectorWrapper(kind()) if wrap else kind()
    with Collector(env, frames_per_batch=4) as collector:
        assert isinstance(collector.env, TorchVectorEnv)
        batch = collector.next()
        assert collector.stats()["env_path"] == "tensor"
    # The batch begins with the reset that was looked at.
    assert batch["a"][:, 0].tolist() == [[1], [1]]
    assert (env.env if wrap else env).resets == 1


def test_a_factory_is_no_environment() -> None:
    with Collector(Bare, frames_per_batch=4) as collector:
        assert isinstance(collector.env, TorchVectorEnv)


def test_arrays_are_refused_or_left_to_gym_env() -> None:
    with pytest.raises(TypeError, match="must return torch tensors, but it returned dict"):
        Collector(Arrays(), frames_per_batch=4)
    with pytest.raises(TypeError, match="'a' must be a torch tensor"):
        Collector(Mixed(), frames_per_batch=4)
    numpy = [
        SyncVectorEnv([NumberedEnv] * 2),
        SelfResettingVectorEnv([NumberedEnv] * 2),
        VectorWrapper(SelfResettingVectorEnv([NumberedEnv] * 2)),
    ]
    for env in numpy:
        with Collector(env, frames_per_batch=4) as collector:
            assert type(collector.env) is GymEnv
            # It was not reset before.
            assert collector.next()["observation"][0, 0, 1] == 0


def test_no_api() -> None:
    with pytest.raises(TypeError, match="NumberedEnv has no num_envs"):
        TorchVectorEnv(NumberedEnv())
    with pytest.raises(ValueError, match="partial_reset must be one of"):
        TorchVectorEnv(NumberedTorchEnv(2), partial_reset="rows")


class Timed:
    """Environment with the parts of the vector API that are needed."""

    metadata = {"autoreset_mode": "NextStep"}  # noqa: RUF012
    num_envs = 2
    single_observation_space = Box(0, 9, (1,))
    single_action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.time, self.ended = torch.zeros(2), torch.zeros(2, dtype=torch.bool)
        return self.time[:, None], {}

    def step(self, action):
        self.time = torch.where(self.ended, 0.0, self.time + 1)
        self.ended = self.time >= torch.tensor([2.0, 3.0])
        ended = torch.zeros(2, dtype=torch.bool)
        return self.time[:, None], torch.ones(2), self.ended, ended, {}

    def close(self):
        pass


class ByAttribute(Timed):
    metadata = None
    autoreset_mode = "NextStep"


@pytest.mark.parametrize("kind", [Timed, ByAttribute])
def test_a_stated_mode_needs_no_unwrapped(kind):
    with Collector(TorchVectorEnv(kind()), frames_per_batch=8) as collector:
        batch = collector.next()
    assert batch["observation"].squeeze(-1).tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch["collector", "mask"].tolist() == [[True, True, False, True], [True] * 3 + [False]]
    assert TorchVectorEnv(kind()).name == kind.__name__


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "doesn't state when it resets.*pass autoreset_mode, one of .* to TorchVectorEnv"),
        ({"autoreset_mode": "Sometimes"}, "must be one of .* but it is 'Sometimes'"),
    ],
)
def test_a_mode_that_is_not_stated_or_wrong_is_named(metadata: Any, words: str) -> None:
    kind = type("Wrong", (Timed,), {"metadata": metadata})
    with pytest.raises(ValueError, match=f"(?s){words}"):
        TorchVectorEnv(kind())
    assert TorchVectorEnv(kind(), autoreset_mode="Disabled").can_restart
