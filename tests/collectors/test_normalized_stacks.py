"""Collectors that both stack and normalise."""

import pytest
import torch
from gymnasium import spaces
from stack_parts import SIZE

from trawl import Collector
from trawl.collectors import NormalizeObservation
from trawl.envs import FrameStack
from trawl.testing import NumberedTorchEnv


class Parts(NumberedTorchEnv):
    """Vector of tensors with the same numbers twice, as ``a`` and as ``b``."""

    def __init__(self):
        super().__init__(3, [2, 5, 3], autoreset_mode="SameStep")
        space = self.single_observation_space
        self.single_observation_space = spaces.Dict(a=space, b=space)

    def _shown(self, obs):
        return {"a": obs, "b": obs.clone()}

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return self._shown(obs), info

    def step(self, actions):
        obs, *rest, info = super().step(actions)
        return self._shown(obs), *rest, {"final_obs": self._shown(info.get("final_obs", obs))}


def of_tensors(count=3, **options):
    with Collector(Parts(), frames_per_batch=21, **options) as collector:
        collector.set_seed(0)
        return [collector.next().clone() for _ in range(count)]


def test_tensors_are_normalised_beside_stacks():
    stack = {"frame_stack": FrameStack(SIZE, keys=["a"])}
    normalize = {
        "normalize_observations": NormalizeObservation(keys=["b"]),
        "normalize_rewards": True,
    }
    found = of_tensors(**stack, **normalize)
    for both, stacked, normalized in zip(
        found, of_tensors(**stack), of_tensors(**normalize), strict=True
    ):
        for prefix in ((), ("next",)):
            assert torch.equal(both[(*prefix, "a")], stacked[(*prefix, "a")])
            assert torch.equal(both[(*prefix, "b")], normalized[(*prefix, "b")])
        assert torch.equal(both["next", "reward"], normalized["next", "reward"])
    # The first batch has no statistics.
    assert not torch.equal(found[-1]["b"], stacked["b"])


def test_the_discount_of_dm_env_is_neither_stacked_nor_normalised():
    pytest.importorskip("dm_control")
    name = "dm_control:cartpole/swingup"
    for options in ({"normalize_observations": True}, {"frame_stack": 3}):
        with Collector(name, frames_per_batch=50, **options) as collector:
            discounts = collector.next()["next", "discount"]
        assert discounts.shape == (50, 1)
        assert (discounts == 1).all()
