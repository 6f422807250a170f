"""Moments of parts, merged in any order, are those of all samples together."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trawl.rollout.moments import RunningMoments


def close(one, other, rtol=1e-9):
    # The deviations of the mean are relative to the largest values that were added up.
    assert one.count == other.count
    scale = np.abs(other.mean) + np.sqrt(other.var) + 1e-300
    assert (np.abs(one.mean - other.mean) <= rtol * scale).all()
    assert (np.abs(one.var - other.var) <= rtol * scale**2).all()


def merged(parts, shape):
    found = RunningMoments.empty(shape)
    for part in parts:
        found = found.merged(part)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.sampled_from([(), (3,), (2, 2)]),
    st.sampled_from([np.float32, np.float64]),
    st.floats(-1e5, 1e5),
)
def test_any_split_merges_to_the_moments_of_all_samples(seed, sizes, shape, dtype, offset):
    rng = np.random.default_rng(seed)
    samples = (rng.normal(size=(sum(sizes), *shape)) * 3 + offset).astype(dtype)
    parts = [RunningMoments.of(part) for part in np.split(samples, np.cumsum(sizes)[:-1])]
    whole = merged(parts, shape)
    assert whole.count == len(samples)
    assert whole.mean.shape == whole.var.shape == shape
    if len(samples):
        exact = samples.astype(np.float64)
        mean = exact.mean(0)
        close(whole, RunningMoments(len(samples), mean, np.square(exact - mean).sum(0)))
    shuffled = [parts[i] for i in rng.permutation(len(parts))]
    close(merged(shuffled, shape), whole)


def test_many_samples_are_added_up_in_parts():
    samples = np.random.default_rng(0).normal(size=(50_000, 3)).astype(np.float32) + 1000
    exact = samples.astype(np.float64)
    found = RunningMoments.of(samples)
    np.testing.assert_allclose(found.mean, exact.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.var, exact.var(0), rtol=1e-9)


def test_no_samples_change_nothing():
    some = RunningMoments.of(np.arange(6.0).reshape(3, 2))
    assert some.merged(RunningMoments.empty((2,))) is some
    assert RunningMoments.empty((2,)).merged(some) is some
    assert RunningMoments.empty((2,)).var.tolist() == [1, 1]


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_a_state_holds_the_moments_exactly(shape):
    some = RunningMoments.of(np.random.default_rng(0).normal(size=(5, *shape)))
    state = some.state_dict()
    assert all(isinstance(state[name], torch.Tensor) for name in ("mean", "deviations"))
    other = RunningMoments.from_state(state)
    assert other.count == some.count
    assert np.array_equal(other.mean, some.mean)
    assert np.array_equal(other.deviations, some.deviations)
    state["mean"] += 1
    assert np.array_equal(other.mean, some.mean)
