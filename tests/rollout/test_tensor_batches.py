"""Batches of environments of torch tensors: what is refused, and what is left out."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensor_parts import (
    COUNT,
    ENDS,
    LENGTHS,
    assert_same,
    collected,
    on_torch,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from trawl.collectors import Collector
from trawl.testing import NumberedTorchEnv


def plain() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Softmax(-1))
    one_hot = TensorDictModule(
        lambda p: nn.functional.one_hot(p.argmax(-1), 4), in_keys=["p"], out_keys=["action"]
    )
    first = TensorDictModule(net, in_keys=["observation"], out_keys=["p"])
    return TensorDictSequential(first, one_hot)


batches = partial(collected, frames_per_batch=4 * COUNT)


class Changing(NumberedTorchEnv):
    """Environment whose data change in its third step."""

    def __init__(self, change: Callable[[Any], Any], part: int) -> None:
        super().__init__(COUNT)
        self.change, self.part, self.steps = change, part, 0

    def step(self, actions: Any) -> Any:
        result = list(super().step(actions))
        self.steps += 1
        if self.steps == 3:
            result[self.part] = self.change(result[self.part])
        return tuple(result)


@pytest.mark.parametrize(
    ("change", "part", "error", "text"),
    [
        (lambda x: x[:, :3], 0, ValueError, r"'observation' has shape \(3, 3\)"),
        (lambda x: x[:2], 0, ValueError, r"'observation' has shape \(2, 5\)"),
        (lambda x: x.double(), 0, TypeError, "'observation' is torch.float64, but at first"),
        (lambda x: x.to("meta"), 0, ValueError, "'observation' is on meta"),
        (lambda x: x.numpy(), 0, TypeError, "'observation' must be a torch tensor"),
        (lambda x: {"a": x}, 0, TypeError, "'observation' must be a torch tensor"),
        (lambda x: x.unsqueeze(0), 1, ValueError, r"reward of shape \(1, 3\)"),
        (lambda x: x.to("meta"), 1, ValueError, "reward on meta"),
        (lambda x: x.tolist(), 2, TypeError, "terminated as list"),
        (lambda x: x[:1], 3, ValueError, r"truncated of shape \(1,\)"),
        (lambda x: x * torch.nan, 1, ValueError, "reward of nan"),
    ],
)
def test_changes_are_refused(change: Any, part: int, error: Any, text: str) -> None:
    with (
        Collector(Changing(change, part), frames_per_batch=12) as collector,
        pytest.raises(error, match=text),
    ):
        next(iter(collector))


class Differentiable(NumberedTorchEnv):
    """Environment whose data have gradients."""

    def step(self, actions: Any) -> Any:
        obs, reward, *flags, info = super().step(actions)
        shown = {name: value.requires_grad_() for name, value in info.items()}
        return obs.requires_grad_(), reward.requires_grad_(), *flags, shown


def test_gradients_are_left_out() -> None:
    batch = batches(Differentiable(COUNT, LENGTHS, ENDS), plain())[0]
    expected = batches(on_torch(AutoresetMode.SAME_STEP, partial_reset=None), plain())[0]
    assert_same(batch, expected)
    assert not any(value.requires_grad for value in batch[0].values(True, True))


def test_missing_last_observation_is_an_error() -> None:
    class Forgetful(NumberedTorchEnv):
        def step(self, actions: Any) -> Any:
            return (*super().step(actions)[:4], {})

    with (
        Collector(Forgetful(COUNT, [2]), frames_per_batch=12) as collector,
        pytest.raises(ValueError, match="no 'final_obs'"),
    ):
        next(iter(collector))


def test_storing_device_and_policy_device() -> None:
    options = {"frames_per_batch": 6, "storing_device": "cpu", "policy_device": "cpu"}
    with Collector(on_torch(AutoresetMode.SAME_STEP), plain(), **options) as collector:
        batch = next(iter(collector))
        assert isinstance(batch, TensorDict)
        assert batch.device == torch.device("cpu")
    with pytest.raises(ValueError, match="can't be moved"):
        Collector(on_torch(AutoresetMode.SAME_STEP), frames_per_batch=6, env_device="meta")
