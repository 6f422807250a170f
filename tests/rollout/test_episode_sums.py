"""Returns and lengths of episodes, whatever batches their steps come in."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trawl.rollout.episode_sums import EpisodeSums


def expected(rewards, done, counted):
    """Return and length of each episode that ends, summed up step by step."""
    found = []
    for env in range(done.shape[1]):
        total, length = 0.0, 0
        for step in range(len(done)):
            if not counted[step, env]:
                total, length = 0.0, 0
                continue
            total, length = total + rewards[step, env], length + 1
            if done[step, env]:
                found.append((total, length))
                total, length = 0.0, 0
    return found


@st.composite
def batches(draw):
    """Steps of some environments, and the rows at which they are cut into batches."""
    shape = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    flags = st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    rewards = np.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
    done, counted = (np.array(draw(flags)).reshape(shape) for _ in range(2))
    cuts = sorted(draw(st.sets(st.integers(1, shape[0]), max_size=3)) | {0, shape[0]})
    return rewards, done & counted, counted, cuts


@given(batches())
def test_sums_do_not_depend_on_batches(data):
    rewards, done, counted, cuts = data
    sums = EpisodeSums(done.shape[1])
    for start, stop in pairwise(cuts):
        part = slice(start, stop)
        sums.add(rewards[part], done[part], counted[part])
    assert sorted(sums.pop()) == sorted(expected(rewards, done, counted))
    assert sums.pop() == []


@given(batches())
def test_without_a_mask_all_steps_count(data):
    rewards, done, _, cuts = data
    sums = EpisodeSums(done.shape[1])
    for start, stop in pairwise(cuts):
        sums.add(rewards[start:stop], done[start:stop])
    assert sorted(sums.pop()) == sorted(expected(rewards, done, np.ones_like(done)))


@given(batches())
def test_rows_may_come_sorted_by_environment(data):
    rewards, done, _, _ = data
    sums = EpisodeSums(done.shape[1])
    envs = np.repeat(np.arange(done.shape[1]), len(done))
    sums.add_rows(envs, rewards.T.reshape(-1), done.T.reshape(-1))
    assert sorted(sums.pop()) == sorted(expected(rewards, done, np.ones_like(done)))


def test_a_batch_without_rows_changes_nothing():
    sums = EpisodeSums(2)
    sums.add_rows(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.bool_))
    assert sums.pop() == []


def test_a_reset_begins_anew_where_it_happened():
    sums, one, end = EpisodeSums(2), np.ones((3, 2)), np.zeros((3, 2), np.bool_)
    sums.add(one, end)
    sums.reset(np.array([True, False]))
    end[-1] = True
    sums.add(one, end)
    assert sums.pop() == [(3.0, 3), (6.0, 6)]


def test_a_state_goes_on_where_it_was_taken():
    sums, one, end = EpisodeSums(2), np.ones((3, 2)), np.zeros((3, 2), np.bool_)
    sums.add(one, end)
    other = EpisodeSums(2)
    other.load_state_dict(sums.state_dict())
    end[-1] = True
    other.add(one, end)
    assert other.pop() == [(6.0, 6)] * 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_small_rewards_are_summed_up_in_double_precision(dtype):
    sums = EpisodeSums(1)
    rewards = np.full((100_000, 1), 0.1, dtype)
    sums.add(rewards, np.zeros(rewards.shape, np.bool_))
    sums.add(rewards[:1], np.ones((1, 1), np.bool_))
    ((total, length),) = sums.pop()
    assert length == 100_001
    assert total == pytest.approx(float(dtype(0.1)) * length, rel=1e-12)
