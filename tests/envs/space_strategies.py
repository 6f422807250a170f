"""Gymnasium spaces of every sort, for property tests."""

import warnings

import numpy as np
from gymnasium import spaces
from hypothesis import assume
from hypothesis import strategies as st

FLOATS = [np.float32, np.float64, np.float16]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8]

shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)


@st.composite
def float_boxes(draw):
    """Boxes with bounds that may be infinite on either side, and differ between entries."""
    shape, dtype = draw(shapes), draw(st.sampled_from(FLOATS))
    size = int(np.prod(shape))
    bound = st.sampled_from([-np.inf, -100.0, -1.0, 0.0, 0.5, 1.0, 100.0, np.inf])
    pairs = draw(st.lists(st.tuples(bound, bound), min_size=size, max_size=size))
    low = [min(pair) if min(pair) < np.inf else -np.inf for pair in pairs]
    high = [max(pair) if max(pair) > -np.inf else np.inf for pair in pairs]
    low, high = (np.array(side, dtype=dtype).reshape(shape) for side in (low, high))
    return spaces.Box(low, high, dtype=dtype)


@st.composite
def integer_boxes(draw):
    """Boxes of integers, up to the limits of their dtype."""
    shape, dtype = draw(shapes), draw(st.sampled_from(INTEGERS))
    # Gymnasium itself can't draw from all of int64.
    least, most = (max(int(np.iinfo(dtype).min), -(2**61)), min(int(np.iinfo(dtype).max), 2**61))
    bound = st.integers(least, most) | st.sampled_from([least, most])
    low, high = sorted([int(draw(bound)), int(draw(bound))])
    return spaces.Box(low, high, shape, dtype)


discretes = st.builds(
    lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 6), st.integers(-5, 5)
)


@st.composite
def multi_discretes(draw):
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple))
    size = int(np.prod(shape))
    several = st.lists(st.integers(1, 5), min_size=size, max_size=size)
    nvec, start = (np.array(draw(several)).reshape(shape) for _ in range(2))
    return spaces.MultiDiscrete(nvec, start=start - 3)


multi_binaries = st.lists(st.integers(1, 3), min_size=1, max_size=2).map(spaces.MultiBinary)

leaves = st.one_of(float_boxes(), integer_boxes(), discretes, multi_discretes(), multi_binaries)


def nests(children):
    names = st.sampled_from(["a", "b", "c", "d"])
    return st.one_of(
        st.dictionaries(names, children, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(children, min_size=1, max_size=3).map(spaces.Tuple),
    )


fixed = st.recursive(leaves, nests, max_leaves=5)


def sampled(space, seed):
    """A sample of the space. Gymnasium 1.1 draws some that aren't in it, at the limits of int8."""
    space.seed(seed)
    sample = space.sample()
    with warnings.catch_warnings():
        # contains() warns of numbers that are no arrays, which sample() draws itself.
        warnings.simplefilter("ignore")
        assume(space.contains(sample))
    return sample
