"""Samples of Gymnasium spaces as tensors, and the way back."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces.utils import flatten
from gymnasium.vector.utils import batch_space, iterate
from hypothesis import given
from hypothesis import strategies as st
from space_strategies import fixed, sampled

from trawl.envs.entries.spaces import SpaceCodec, TensorCodec

categorical = st.booleans()
seeds = st.integers(0, 1000)


def same(space, first, second):
    """Whether two samples are equal, entry by entry."""
    return np.array_equal(flatten(space, first), flatten(space, second))


@given(
    space=fixed,
    root=st.sampled_from(["observation", "action"]),
    categorical=categorical,
    seed=seeds,
    count=st.integers(1, 3),
)
def test_samples_and_batches_of_them_are_encoded_and_come_back(
    space, root, categorical, seed, count
):
    codec = SpaceCodec(space, root, categorical)
    assert codec.fixed
    sample = sampled(space, seed)
    values = codec.encode(sample)
    for leaf, value in zip(codec.leaves, values, strict=True):
        array = np.asarray(value)
        leaf.check(array)
        assert leaf.spec.is_in(torch.from_numpy(np.array(array)).to(leaf.spec.dtype))
    assert same(space, codec.decode([np.array(value) for value in values]), sample)
    # A batch is encoded as its rows are, and decoded for a vector environment.
    batch = batch_space(space, count)
    together = codec.encode(sampled(batch, seed))
    rows = list(iterate(batch, sampled(batch, seed)))
    for row, single in enumerate(rows):
        for whole, value in zip(together, codec.encode(single), strict=True):
            assert np.array_equal(np.asarray(whole)[row], value)
    decoded = codec.decode([np.array(value) for value in together])
    for row, single in enumerate(iterate(batch, decoded)):
        assert same(space, single, rows[row])


@given(space=fixed, categorical=categorical)
def test_a_random_draw_that_is_decoded_lies_in_the_space_and_is_the_environments_own(
    space, categorical
):
    codec = SpaceCodec(space, "action", categorical)
    drawn = codec.composite().rand()
    arrays = [drawn.get(leaf.key).numpy() for leaf in codec.leaves]
    decoded = codec.decode(arrays)
    # A scalar of numpy is fine for environments, but Gymnasium warns of it here.
    assert space.contains(decoded) or same(space, decoded, decoded)
    expected = flatten(space, decoded).copy()
    for array in arrays:
        array[...] = 0
    assert np.array_equal(flatten(space, decoded), expected)


def keys(space, root="observation", categorical=False):
    codec = SpaceCodec(space, root, categorical)
    return {leaf.key: (tuple(leaf.spec.shape), leaf.spec.dtype) for leaf in codec.leaves}


def test_entries_of_a_dict_keep_their_names_and_those_of_a_tuple_are_numbered():
    space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "body": spaces.Dict({"joints": spaces.Box(-1, 1, (2,)), "feet": spaces.MultiBinary(4)}),
            "pair": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (), np.float64))),
        }
    )
    assert keys(space) == {
        ("camera",): ((4, 4, 3), torch.uint8),
        ("body", "joints"): ((2,), torch.float32),
        ("body", "feet"): ((4,), torch.int8),
        ("pair", "0"): ((3,), torch.int64),
        ("pair", "1"): ((1,), torch.float64),
    }


def test_a_tuple_on_top_is_under_the_root():
    space = spaces.Tuple((spaces.Discrete(2), spaces.Dict({"x": spaces.Discrete(3)})))
    assert set(keys(space, "action")) == {("action", "0"), ("action", "1", "x")}


@pytest.mark.parametrize(
    ("space", "one_hot", "index"),
    [
        (spaces.Discrete(4, start=-1), (4,), ()),
        (spaces.MultiDiscrete([2, 3]), (5,), (2,)),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), (14,), (2, 2)),
    ],
)
def test_choices_are_one_hot_or_an_index(space, one_hot, index):
    assert keys(space) == {("observation",): (one_hot, torch.int64)}
    assert keys(space, categorical=True) == {("observation",): (index, torch.int64)}


def test_a_choice_counts_from_its_start():
    codec = SpaceCodec(spaces.Discrete(3, start=5), "action")
    assert codec.encode(6)[0].tolist() == [0, 1, 0]
    assert codec.decode([np.array([0, 0, 1])]) == 7
    with pytest.raises(ValueError, match="outside its space of 3 values"):
        codec.encode(8)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_large_unsigned_integers_keep_their_values(dtype):
    top = int(np.iinfo(dtype).max)
    space = spaces.Box(0, top, (2,), dtype)
    codec = SpaceCodec(space, "observation")
    (value,) = codec.encode(np.array([0, top], dtype=dtype))
    assert torch.from_numpy(value).dtype == codec.leaves[0].spec.dtype
    assert space.contains(codec.composite().rand()["observation"].numpy())
    assert repr(codec.composite()) == repr(codec.composite())


def test_actions_are_of_the_spaces_dtype():
    space = spaces.Dict(
        {"a": spaces.Box(-1, 1, (2,)), "b": spaces.Box(-1, 1, ()), "c": spaces.MultiBinary(2)}
    )
    arrays = [np.zeros(2), np.zeros(1), np.zeros(2, dtype=np.int64)]
    decoded = SpaceCodec(space, "action").decode(arrays)
    assert {name: value.dtype for name, value in decoded.items()} == {
        "a": np.float32,
        "b": np.float32,
        "c": np.int8,
    }


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(3)),
        spaces.Graph(spaces.Box(0, 1), None),
        spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Text(5)}),
        spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1)]),
    ],
)
def test_what_has_no_fixed_layout_is_known(space):
    assert not SpaceCodec(space, "observation").fixed


# --- the same as tensors

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
