"""Specs: random values in their domain, and what they say of themselves."""

from itertools import product

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from space_strategies import fixed

from trawl.envs import GymEnv
from trawl.envs.entries.spaces import SpaceCodec
from trawl.envs.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)

batches = st.lists(st.integers(1, 3), max_size=2).map(tuple)


@given(space=fixed, categorical=st.booleans(), batch=batches, more=batches)
def test_random_values_and_zeros_are_as_their_specs_say(space, categorical, batch, more):
    spec, other = (SpaceCodec(space, "x", categorical).composite(batch) for _ in range(2))
    torch.manual_seed(3)
    drawn = spec.rand(more)
    assert drawn.batch_size == (*more, *batch)
    assert spec.is_in(drawn)
    zero = spec.zero()
    for key, leaf in spec.items(True, True):
        assert drawn.get(key).shape == (*more, *leaf.shape)
        assert drawn.get(key).dtype == leaf.dtype == zero.get(key).dtype
        assert zero.get(key).shape == leaf.shape
        assert not zero.get(key).any()
    torch.manual_seed(3)
    assert (other.rand(more) == drawn).all()
    assert spec == other == spec.clone()
    assert hash(spec) == hash(other)
    assert spec.expand(4, *batch) != spec


LEAVES = {
    "unbounded": Unbounded((2,)),
    "unbounded integers": Unbounded((2,), torch.int32),
    "bounded": Bounded(torch.zeros(2), torch.ones(2), torch.float32),
    "integers": Bounded(torch.zeros(2).int(), torch.full((2,), 9).int(), torch.int32),
    "categorical": Categorical(3, (2,)),
    "multi-categorical": MultiCategorical(torch.tensor([2, 3])),
    "one-hot": OneHot(3),
    "multi-one-hot": MultiOneHot([2, 3]),
    "binary": Binary((2,)),
}


def test_specs_are_equal_only_to_those_of_their_sort():
    for first, second in product(LEAVES, LEAVES):
        assert (LEAVES[first] == LEAVES[second]) == (first == second), (first, second)


@pytest.mark.parametrize(
    ("spec", "outside"),
    [
        (LEAVES["bounded"], torch.tensor([0.5, 1.5])),
        (LEAVES["bounded"], torch.tensor([0.5, float("nan")])),
        (LEAVES["bounded"], torch.tensor([0.5, 0.5, 0.5])),
        (LEAVES["bounded"], torch.tensor([0.5, 0.5], dtype=torch.float64)),
        (LEAVES["integers"], torch.tensor([-1, 3], dtype=torch.int32)),
        (LEAVES["categorical"], torch.tensor([0, 3])),
        (LEAVES["multi-categorical"], torch.tensor([2, 0])),
        (LEAVES["one-hot"], torch.tensor([1, 1, 0])),
        (LEAVES["one-hot"], torch.tensor([0, 0, 0])),
        (LEAVES["one-hot"], torch.tensor([2, -1, 0])),
        (LEAVES["multi-one-hot"], torch.tensor([1, 1, 0, 0, 0])),
        (LEAVES["binary"], torch.tensor([0, 2], dtype=torch.int8)),
    ],
)
def test_what_lies_outside_is_known(spec, outside):
    assert not spec.is_in(outside)


def test_bounds_that_differ_in_one_entry_make_another_spec():
    low, high = torch.tensor([-2.0, -2.0]), torch.tensor([2.0, 2.0])
    first = Bounded(low, high, torch.float32)
    narrow = Bounded(torch.tensor([-1.0, -2.0]), high, torch.float32)
    assert first != narrow
    assert Composite({"a": first}) != Composite({"a": narrow})


def test_random_values_fill_their_bounds():
    drawn = Bounded(torch.tensor([-3.0]), torch.tensor([5.0]), torch.float32).rand((4000,))
    assert -3 <= drawn.min() < -2.9
    assert 4.9 < drawn.max() <= 5
    assert abs(drawn.mean() - 1) < 0.2


@pytest.mark.parametrize(
    ("low", "high", "dtype", "count"),
    [
        (2, 5, torch.int64, 4),
        (0, 255, torch.uint8, 256),
        *(
            (torch.iinfo(one).min, torch.iinfo(one).max, one, 99)
            for one in (torch.int64, torch.int32)
        ),
    ],
)
def test_random_integers_reach_both_bounds(low, high, dtype, count):
    spec = Bounded(*torch.tensor([[low], [high]], dtype=dtype), dtype)
    drawn = spec.rand((20000,))
    assert spec.is_in(drawn)
    assert len(drawn.unique()) >= count


@pytest.mark.parametrize("others", [[], [1.0], [torch.inf]], ids=["alone", "bounded", "unbounded"])
def test_bounds_as_wide_as_the_dtype_do_not_overflow(others):
    high = torch.tensor([torch.finfo(torch.float32).max, *others])
    drawn = Bounded(-high, high, torch.float32).rand((100,))
    assert drawn.isfinite().all()


@pytest.mark.parametrize("spec", [OneHot(4), Categorical(4), MultiOneHot([4, 2]), Binary((3,))])
def test_each_choice_is_drawn(spec):
    drawn = spec.rand((400,)).reshape(400, -1)
    assert len(drawn.unique(dim=0)) == {4: 4, 6: 8, 3: 8, 1: 4}[drawn.shape[1]]


def test_text_is_drawn_by_torchs_generator():
    space, other = spaces.Text(20), spaces.Text(20)
    space.seed(5)
    other.seed(5)
    spec = NonTensor(space)
    torch.manual_seed(1)
    first, after = spec.rand().data, torch.rand(())
    # The generator of the environment's own space is left alone.
    assert space.sample() == other.sample()
    torch.manual_seed(1)
    # A blank draws nothing.
    assert spec.zero().data == spec.zero().data
    assert spec.rand().data == first
    assert torch.rand(()) == after
    assert spec.rand().data != first


def test_a_batch_of_text_is_a_stack():
    spec = NonTensor(spaces.Text(20)).expand(2)
    drawn = spec.rand((3,))
    assert drawn.batch_size == (3, 2)
    assert spec.is_in(drawn)
    assert not NonTensor(spaces.Text(1)).expand(2).is_in(drawn)


def test_a_composite_is_read_and_written_by_keys():
    inner = Composite({"b": LEAVES["one-hot"]})
    spec = Composite({"a": inner, "c": LEAVES["binary"]})
    assert spec["a", "b"] is spec["a"]["b"] is LEAVES["one-hot"]
    assert list(spec.keys()) == list(spec) == ["a", "c"]
    assert list(spec.keys(True)) == ["a", ("a", "b"), "c"]
    assert list(spec.keys(True, True)) == [("a", "b"), "c"]
    assert list(spec.values(True, True)) == [LEAVES["one-hot"], LEAVES["binary"]]
    assert ("a", "b") in spec
    assert "b" not in spec
    assert len(spec) == 2
    copy = spec.clone()
    copy["a", "d"] = LEAVES["one-hot"]
    assert ("a", "d") not in spec
    with pytest.raises(KeyError, match=r"'c' already holds a leaf"):
        spec["c", "b"] = LEAVES["binary"]
    spec = Composite(shape=(2,))
    spec["a", "b", "c"] = LEAVES["binary"]
    assert spec["a", "b"].shape == (2,)
    assert spec["a", "b", "c"] is LEAVES["binary"]


def test_a_composite_lacks_what_is_missing_or_wrong():
    spec = Composite({"a": LEAVES["one-hot"], "b": Composite({"c": LEAVES["binary"]})})
    drawn = spec.rand()
    assert spec.is_in(drawn)
    assert not spec.is_in(drawn.exclude("a"))
    assert not spec.is_in(drawn.clone().set(("b", "c"), torch.tensor([3, 0], dtype=torch.int8)))


def test_a_composite_shows_its_leaves():
    spec = Composite({"a": Composite({"b": LEAVES["bounded"]}), "c": NonTensor(spaces.Text(3))})
    shown = repr(spec)
    assert "b: Bounded(shape=(2,), low=0.0, high=1.0, dtype=torch.float32)" in shown
    assert "c: NonTensor(Text(" in shown


def test_moving_a_spec_moves_what_it_draws():
    spec = Composite({"a": LEAVES["bounded"]}).to("meta")
    assert spec.zero()["a"].device.type == "meta"
    assert LEAVES["bounded"].device.type == "cpu"


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_what_a_large_unsigned_integer_may_be_is_known(dtype):
    low, high = (torch.from_numpy(np.array([bound], dtype=dtype)) for bound in (3, 60000))
    spec = Bounded(low, high, low.dtype)
    assert spec.is_in(spec.rand())
    assert not spec.is_in(torch.from_numpy(np.array([2], dtype=dtype)))
    assert spec == spec.clone()


def test_the_number_of_dimensions():
    spec = GymEnv("Pendulum-v1").observation_spec
    assert (spec.ndim, spec["observation"].ndim, spec.expand(2)["observation"].ndim) == (0, 1, 2)
