"""Samples of spaces as tensors, compared with the same samples as arrays."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from trawl.envs.entries.spaces import SpaceCodec, TensorCodec

CPU = torch.device("cpu")
SPACE = spaces.Dict(
    {
        "box": spaces.Box(-1, 1, (2, 3)),
        "discrete": spaces.Discrete(3, start=2),
        "several": spaces.MultiDiscrete([2, 3]),
        "binary": spaces.MultiBinary(4),
        "nested": spaces.Tuple((spaces.Box(0, 1, ()), spaces.Discrete(2))),
    }
)


def tensors(sample: Any) -> Any:
    if isinstance(sample, dict):
        return {name: tensors(part) for name, part in sample.items()}
    if isinstance(sample, tuple):
        return tuple(map(tensors, sample))
    return torch.from_numpy(np.array(sample))


def leaves(sample: Any) -> list[Any]:
    parts = sample.values() if isinstance(sample, dict) else sample
    if isinstance(sample, (dict, tuple)):
        return [leaf for part in parts for leaf in leaves(part)]
    return [sample]


@pytest.mark.parametrize("categorical", [False, True])
def test_same_as_arrays(categorical: bool) -> None:
    batch = batch_space(SPACE, 5)
    batch.seed(0)
    sample = batch.sample()
    arrays = SpaceCodec(SPACE, "observation", categorical)
    own = TensorCodec(SPACE, "observation", CPU, 5, categorical)
    expected, found = arrays.encode(sample), own.encode(tensors(sample))
    for one, other in zip(expected, found, strict=True):
        assert np.array_equal(one, other.numpy())
    again = own.decode(found)
    for one, other in zip(leaves(arrays.decode(expected)), leaves(again), strict=True):
        assert torch.from_numpy(np.array(one)).dtype is other.dtype
        assert np.array_equal(one, other.numpy())


@pytest.mark.parametrize("categorical", [False, True])
def test_discrete_values_may_have_any_dtype(categorical: bool) -> None:
    for space, dtype in [
        (spaces.Discrete(2), torch.bool),
        (spaces.Discrete(40, start=30), torch.uint8),
        (spaces.Discrete(200, start=-100), torch.int8),
        (spaces.MultiDiscrete([2, 2]), torch.bool),
    ]:
        batch = batch_space(space, 5)
        batch.seed(0)
        sample = batch.sample()
        (wanted,) = SpaceCodec(space, "observation", categorical).encode(sample)
        codec = TensorCodec(space, "observation", CPU, 5, categorical)
        (found,) = codec.encode(torch.from_numpy(sample).to(dtype))
        assert np.array_equal(found.numpy(), wanted)


def test_actions_are_copies() -> None:
    codec = TensorCodec(spaces.Box(-1, 1, (2,)), "action", CPU, 3)
    action = torch.zeros(3, 2)
    codec.decode([action]).fill_(1)
    assert not action.any()


def test_loose_spaces_are_refused() -> None:
    with pytest.raises(ValueError, match="fixed shape and dtype, but 'observation'"):
        TensorCodec(spaces.Text(3), "observation", CPU, 3)


def test_missing_entries_are_named() -> None:
    codec = TensorCodec(SPACE, "observation", CPU, 3)
    with pytest.raises(ValueError, match=r"'binary' is missing: .* keys"):
        codec.encode({"other": torch.zeros(3)})
