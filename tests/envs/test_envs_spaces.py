"""Samples of Gymnasium spaces as tensors, and the way back."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces.utils import flatten
from gymnasium.vector.utils import batch_space, iterate
from hypothesis import given
from hypothesis import strategies as st
from space_strategies import fixed, sampled

from trawl.envs.entries.spaces import SpaceCodec

categorical = st.booleans()
seeds = st.integers(0, 1000)


def same(space, first, second):
    """Whether two samples are equal, entry by entry."""
    return np.array_equal(flatten(space, first), flatten(space, second))


@given(space=fixed, categorical=categorical, seed=seeds)
def test_a_sample_that_is_encoded_lies_in_the_specs(space, categorical, seed):
    codec = SpaceCodec(space, "observation", categorical)
    values = codec.encode(sampled(space, seed))
    for leaf, value in zip(codec.leaves, values, strict=True):
        array = np.asarray(value)
        leaf.check(array)
        assert leaf.spec.is_in(torch.from_numpy(np.array(array)).to(leaf.spec.dtype))


@given(space=fixed, categorical=categorical, seed=seeds)
def test_what_is_encoded_and_decoded_is_the_same(space, categorical, seed):
    codec = SpaceCodec(space, "action", categorical)
    sample = sampled(space, seed)
    decoded = codec.decode([np.array(value) for value in codec.encode(sample)])
    assert same(space, decoded, sample)


@given(space=fixed, categorical=categorical)
def test_a_random_draw_that_is_decoded_lies_in_the_space(space, categorical):
    codec = SpaceCodec(space, "action", categorical)
    drawn = codec.composite().rand()
    decoded = codec.decode([drawn.get(leaf.key).numpy() for leaf in codec.leaves])
    # A scalar of numpy is fine for environments, but Gymnasium warns of it here.
    assert space.contains(decoded) or same(space, decoded, decoded)


@given(space=fixed, categorical=categorical, seed=seeds, count=st.integers(1, 3))
def test_a_batch_is_encoded_as_its_rows_are(space, categorical, seed, count):
    codec = SpaceCodec(space, "observation", categorical)
    batch = batch_space(space, count)
    sample = sampled(batch, seed)
    together = codec.encode(sample)
    for row, single in enumerate(iterate(batch, sample)):
        for whole, value in zip(together, codec.encode(single), strict=True):
            assert np.array_equal(np.asarray(whole)[row], value)


@given(space=fixed, categorical=categorical, seed=seeds, count=st.integers(1, 3))
def test_a_batch_of_actions_is_decoded_for_a_vector_environment(space, categorical, seed, count):
    codec = SpaceCodec(space, "action", categorical)
    batch = batch_space(space, count)
    sample = sampled(batch, seed)
    decoded = codec.decode([np.array(value) for value in codec.encode(sample)])
    rows = list(iterate(batch, sample))
    for row, single in enumerate(iterate(batch, decoded)):
        assert same(space, single, rows[row])


@given(space=fixed, categorical=categorical)
def test_an_action_that_an_environment_keeps_is_its_own(space, categorical):
    codec = SpaceCodec(space, "action", categorical)
    arrays = [codec.composite().rand().get(leaf.key).numpy() for leaf in codec.leaves]
    before = [array.copy() for array in arrays]
    decoded = codec.decode(arrays)
    expected = flatten(space, decoded).copy()
    for array in arrays:
        array[...] = 0
    assert np.array_equal(flatten(space, decoded), expected)
    assert len(before) == len(arrays)


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


def test_a_choice_outside_of_its_space_is_refused():
    codec = SpaceCodec(spaces.Discrete(3, start=5), "observation")
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


@given(space=fixed)
def test_what_has_a_fixed_layout_is_known(space):
    assert SpaceCodec(space, "observation").fixed
