"""Recognition of vector environments whose data are torch tensors, and errors of their adapter."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from trawl.collectors import Collector
from trawl.envs import GymEnv, TorchVectorEnv
from trawl.testing import NumberedEnv, NumberedTorchEnv, Script, SelfResettingVectorEnv
from trawl.testing.scripted_envs import TensorSimulator

COUNT = 3


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


# --- infos


class Quiet(TensorSimulator):
    """Simulator that counts its resets, and doesn't tell the infos of last steps."""

    resets = 0

    def __init__(self, mode: str = "Disabled") -> None:
        super().__init__(Script(levels=True), range(COUNT), mode)

    def reset(self, **options: Any) -> Any:
        self.resets += 1
        return super().reset(**options)

    def step(self, actions: Any) -> Any:
        *results, info = super().step(actions)
        return *results, {name: one for name, one in info.items() if "final_info" not in name}


def collected(env: Any) -> Any:
    with Collector(env, frames_per_batch=7 * COUNT) as collector:
        return collector.next()


def test_a_reset_is_not_repeated_if_it_has_all_names() -> None:
    batch = collected(TorchVectorEnv(Quiet(), info_keys=["level"]))
    assert batch["info", "level"][:, 0, 0].tolist() == [0.5, 1000.5, 2000.5]
    inner = Quiet()
    TorchVectorEnv(inner, info_keys={"level": Box(0, 9999, (1,))})
    assert inner.resets == 0


def test_the_last_step_without_final_info() -> None:
    batch = collected(TorchVectorEnv(Quiet("SameStep"), info_keys=["level"]))
    done = batch["next", "done"][:, :-1, 0]
    after = batch["info", "level"][:, 1:, 0]
    # Both the last observation and the first one of the next episode have the values.
    assert torch.equal(batch["next", "info", "level"][:, :-1, 0][done], after[done])


class Telling(NumberedTorchEnv):
    """Environment with an entry in the info that changes in the second step."""

    def __init__(self, value: Any) -> None:
        super().__init__(COUNT)
        self.values = [torch.zeros(COUNT, 2), torch.zeros(COUNT, 2), value]

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {"x": self.values.pop(0)}

    def step(self, actions: Any) -> Any:
        *results, info = super().step(actions)
        return *results, {**info, "x": self.values.pop(0)}


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (np.zeros((COUNT, 2)), TypeError, r"info\['x'\] must be a torch tensor, .* ndarray"),
        (torch.zeros(COUNT), ValueError, r"info\['x'\] has shape \(3,\), .* \(3, 2\)"),
        (torch.zeros(COUNT, 2).to("meta"), ValueError, r"info\['x'\] is on meta"),
        (torch.zeros(COUNT, 2, dtype=torch.complex64), TypeError, r"info\['x'\] is torch.complex"),
    ],
)
def test_values_that_dont_fit_are_errors(value: Any, error: Any, text: str) -> None:
    env = TorchVectorEnv(Telling(value), info_keys=["x"])
    with (
        Collector(env, frames_per_batch=12) as collector,
        pytest.raises(error, match=text),
    ):
        collector.next()


def test_names_that_dont_exist_are_errors() -> None:
    with pytest.raises(ValueError, match=r"info_keys has 'none', but the info of Quiet has"):
        TorchVectorEnv(Quiet(), info_keys=["none", "level"])
    with pytest.raises(ValueError, match="no fixed layout"):
        TorchVectorEnv(Quiet(), info_keys={"level": object})
    with pytest.raises(TypeError, match="must be a list of names"):
        TorchVectorEnv(Quiet(), info_keys="level")
