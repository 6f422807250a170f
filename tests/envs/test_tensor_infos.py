"""Entries of the info of environments of tensors: layouts, mistakes, and what is not told."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from trawl.collectors import Collector
from trawl.envs import TorchVectorEnv
from trawl.testing import NumberedTorchEnv, Script
from trawl.testing.scripted_envs import TensorSimulator

COUNT = 3


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


class Wrong(NumberedTorchEnv):
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
    env = TorchVectorEnv(Wrong(value), info_keys=["x"])
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
