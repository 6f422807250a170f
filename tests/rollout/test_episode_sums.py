"""Returns and lengths of episodes, whatever batches their steps come in."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trawl.rollout.episode_sums import EpisodeSums


def found(sums):
    """Return and length of each episode that has ended."""
    count, returns, lengths = sums.pop()
    assert count == len(returns)
    return sorted(zip(returns, lengths, strict=True))


def expected(rewards, done, counted):
    """Return and length of each episode that ends, summed up step by step."""
    found = []
    for env in range(done.shape[1]):
        total, length = 0.0, 0
        for step in range(len(done)):
            if not counted[step, env]:
                # The step failed, and the episode before it has ended without a flag.
                found += [(total, length)] * bool(length)
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


@given(batches(), st.booleans())
def test_sums_do_not_depend_on_batches(data, masked):
    rewards, done, counted, cuts = data
    if not masked:
        counted = np.ones_like(done)
    sums = EpisodeSums(done.shape[1])
    for start, stop in pairwise(cuts):
        part = slice(start, stop)
        sums.add(rewards[part], done[part], *[counted[part]] * masked)
    assert found(sums) == sorted(expected(rewards, done, counted))
    assert sums.pop() == (0, (), ())


def test_many_environments_are_added_alike():
    rng = np.random.default_rng(0)
    rows, alike = EpisodeSums(1024), EpisodeSums(1024)
    for share in (0.1, 0, 0.3):
        rewards = rng.integers(-9, 9, (7, 1024)).astype(np.float32)
        done = rng.random((7, 1024)) < share
        rows.add(rewards, done)
        # With a mask, the batch is added as a whole.
        alike.add(rewards, done, np.ones_like(done))
        assert rows.state_dict() == alike.state_dict()
        assert rows.pop() == alike.pop()


@given(batches(), st.randoms())
def test_frames_may_come_in_any_order_of_environments(data, randomly):
    rewards, done, _, (_, cut, *_) = data
    envs, steps = [env for env in range(done.shape[1]) for _ in done], [0] * done.shape[1]
    randomly.shuffle(envs)
    frames = []
    for env in envs:
        frames.append((env, rewards[steps[env], env], done[steps[env], env]))
        steps[env] += 1
    sums = EpisodeSums(done.shape[1])
    for part in (slice(cut), slice(cut, None), slice(0)):
        sums.add_rows(*(np.array(column)[part] for column in zip(*frames, strict=True)))
    assert found(sums) == sorted(expected(rewards, done, np.ones_like(done)))


@pytest.mark.parametrize("steps", [50, 5000])
@pytest.mark.parametrize("in_rows", [False, True])
def test_the_last_hundred_episodes_are_kept(steps, in_rows):
    sums = EpisodeSums(3)
    rewards = np.arange(3.0 * steps).reshape(steps, 3)
    every = np.ones((steps, 3), np.bool_)
    if in_rows:
        sums.add_rows(np.tile(np.arange(3), steps), rewards.reshape(-1), every.reshape(-1))
    else:
        sums.add(rewards, every)
    count, returns, lengths = sums.pop()
    assert count == 3 * steps
    assert returns == tuple(range(3 * steps - 100, 3 * steps))
    assert lengths == (1,) * 100


def test_a_state_goes_on_where_it_was_taken_and_a_reset_begins_anew():
    sums, one, end = EpisodeSums(2), np.ones((3, 2)), np.zeros((3, 2), np.bool_)
    sums.add(one, end)
    other = EpisodeSums(2)
    other.load_state_dict(sums.state_dict())
    sums.reset(np.array([True, False]))
    end[-1] = True
    for each in (sums, other):
        each.add(one, end)
    assert found(sums) == [(3.0, 3), (6.0, 6)]
    assert found(other) == [(6.0, 6)] * 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_small_rewards_are_summed_up_in_double_precision(dtype):
    sums = EpisodeSums(1)
    rewards = np.full((100_000, 1), 0.1, dtype)
    sums.add(rewards, np.zeros(rewards.shape, np.bool_))
    sums.add(rewards[:1], np.ones((1, 1), np.bool_))
    ((total, length),) = found(sums)
    assert length == 100_001
    assert total == pytest.approx(float(dtype(0.1)) * length, rel=1e-12)
