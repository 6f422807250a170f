"""Moments of parts, merged in any order, are those of all samples together."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trawl.rollout.moments import RunningMoments, TensorMoments


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


@pytest.mark.parametrize("count", [1, 7, 50_000])
@pytest.mark.parametrize(("shape", "some"), [((), False), ((3,), True), ((2, 20), False)])
def test_tensors_have_the_moments_of_arrays(count, shape, some):
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(count, *shape)) * 3 + 50).astype(np.float32) for _ in range(3)]
    masks = [rng.random(count) < 0.5 if some else None for _ in parts]
    found, own = (
        RunningMoments.empty(shape),
        TensorMoments.on(torch.device("cpu"), merged([], shape)),
    )
    for part, mask in zip(parts, masks, strict=True):
        found = found.merged(RunningMoments.of(part, mask))
        if mask is not None:
            part[~mask] = np.nan  # a sample that doesn't count may have any value
            mask = torch.from_numpy(mask)
        samples = torch.from_numpy(part)
        before = samples.clone()
        own = own.merged(TensorMoments.of(samples, mask))
        assert torch.equal(samples.nan_to_num(), before.nan_to_num())
    close(own.on_host(), found)
    for one, other in zip(own.affine(1e-8), found.affine(1e-8), strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-9)


def test_tensors_without_samples_change_nothing():
    empty = TensorMoments.on(torch.device("cpu"), RunningMoments.empty((2,)))
    some = TensorMoments.of(torch.arange(6.0).reshape(3, 2))
    none = TensorMoments.of(torch.full((3, 2), torch.nan), torch.zeros(3, dtype=torch.bool))
    for one, other in ((empty, some), (some, empty), (some, none), (none, some)):
        found = one.merged(other)
        assert float(found.counts) == 3
        assert torch.equal(found.mean, some.mean)
        assert torch.equal(found.deviations, some.deviations)
    mean, scale = empty.affine(1e-3)
    assert mean.tolist() == [0, 0]
    assert scale.tolist() == [1, 1]


def test_double_samples_are_not_changed():
    samples = torch.arange(6.0, dtype=torch.float64).reshape(3, 2)
    TensorMoments.of(samples)
    assert torch.equal(samples, torch.arange(6.0, dtype=torch.float64).reshape(3, 2))


def test_elements_that_are_absent_do_not_count():
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(9, 3, 2)) + 7
    present = rng.random((9, 3)) < 0.6
    present[:, 2] = False
    found = RunningMoments.empty((3, 2), 1)
    for part in (slice(0, 4), slice(4, 9)):
        found = found.merged(RunningMoments.of(samples[part], present[part]))
    assert found.counts.shape == (3, 1)
    assert found.count == present.sum(0).max()
    for agent in range(2):
        own = samples[present[:, agent], agent]
        assert found.counts[agent, 0] == len(own)
        np.testing.assert_allclose(found.mean[agent], own.mean(0), rtol=1e-12)
        np.testing.assert_allclose(found.var[agent], own.var(0), rtol=1e-9)
    assert found.var[2].tolist() == [1, 1]
    assert found.affine(1.0)[1][2].tolist() == [1, 1]
    again = RunningMoments.from_state(found.state_dict())
    assert np.array_equal(again.counts, found.counts)
