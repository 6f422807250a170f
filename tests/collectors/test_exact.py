"""Collectors that collect exactly ``total_frames``."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from multi_parts import CLASSES, MASK, TRAJ_IDS, drained, ledger, make
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage

from trawl.collectors import Collector
from trawl.collectors.driver.exact import first_frames, shares
from trawl.keys import NO_TRAJECTORY
from trawl.testing import NumberedEnv


def numbered(batch_size, mask=None):
    """A batch whose ids number its frames from 0, with the environment in front of the step."""
    count = math.prod(batch_size)
    flags = {key: torch.zeros(*batch_size, 1, dtype=torch.bool) for key in ("truncated", "done")}
    batch = TensorDict({"next": flags}, batch_size)
    batch.set(TRAJ_IDS, torch.arange(count).view(batch_size))
    return batch if mask is None else batch.set(MASK, mask)


def kept(batch):
    ids = batch[TRAJ_IDS]
    return ids[ids != NO_TRAJECTORY].tolist()


# --- parts of a batch


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_the_first_frames_are_kept_step_by_step(envs, steps, data):
    mask = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=envs * steps, max_size=envs * steps))
    ).view(envs, steps)
    count = data.draw(st.integers(0, int(mask.sum())))
    batch = numbered((envs, steps), mask)
    order = [env * steps + step for step in range(steps) for env in range(envs) if mask[env, step]]
    found = first_frames(batch, count)
    assert sorted(kept(found)) == sorted(order[:count])
    assert found[MASK].sum() == count
    assert not count or found[MASK][:, -1].any()


def test_whole_steps_need_no_mask():
    found = first_frames(numbered((2, 3)), 4)
    assert found.shape == (2, 2)
    assert MASK not in found.keys(True)


def test_an_environment_that_loses_frames_is_truncated_before():
    batch = numbered((2, 3))
    truncated = first_frames(batch, 3, truncate=True)["next", "truncated"]
    assert truncated[..., 0].tolist() == [[False, True], [True, False]]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(0, 400),
)
def test_shares_add_up_and_fit(workers, total):
    units = [unit for _, unit in workers]
    sizes = [rows * unit for rows, unit in workers]
    found = shares(total, sizes, units)
    rest = min(total, sum(sizes)) - sum(found)
    assert 0 <= rest < max(units)
    assert all(0 <= share <= size for share, size in zip(found, sizes, strict=True))
    assert all(share % unit == 0 for share, unit in zip(found, units, strict=True))


# --- one process


def test_environments_take_no_step_beyond():
    env = NumberedEnv()
    with Collector(env, frames_per_batch=10, total_frames=13, exact_frames=True) as collector:
        assert [len(batch) for batch in collector] == [10, 3]
    assert len(env.actions) == 13


# --- workers


@pytest.mark.parametrize(("cat", "prefetch"), [("stack", 1), (0, 0), (-1, 1)])
def test_parts_of_workers_are_joined_exactly(cat, prefetch):
    book = ledger(3, 2)
    options = {"frames_per_batch": 24, "total_frames": 61, "exact_frames": True}
    collector = make(workers=3, lanes=2, cat_results=cat, prefetch=prefetch, **options)
    drained(collector, book)
    assert book.frames == 61


@pytest.mark.parametrize(("cls", "total"), [(CLASSES[0], 1), (CLASSES[1], 41)])
def test_workers_that_write_themselves_write_these_frames(cls, total):
    from torchrl.data import ReplayBuffer

    buffer = ReplayBuffer(storage=LazyTensorStorage(100), shared=True)
    options = {"frames_per_batch": 12, "total_frames": total, "exact_frames": True}
    options |= {"replay_buffer": buffer, "set_truncated": True}
    with make(cls, lanes=3, start_method="forkserver", **options) as collector:
        for _ in collector:
            pass
        assert collector.stats()["frames"] == total
    assert len(buffer) == total
