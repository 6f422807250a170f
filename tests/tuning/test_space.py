"""The layouts that a search tries."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trawl.extras.tuning import Candidate
from trawl.extras.tuning.space import (
    SearchSpace,
    most_processes,
    space_for,
    usable_cores,
)

SPACES = st.builds(
    SearchSpace,
    processes=st.integers(1, 100),
    frames=st.integers(1, 5000),
    fixed_frames=st.booleans(),
    envs_per_process=st.sampled_from([(1,), (1, 4), (1, 4, 16)]),
    max_envs=st.none() | st.integers(1, 300),
    sync=st.none() | st.booleans(),
    learner=st.booleans(),
    compiled=st.booleans(),
)


@given(SPACES)
def test_all_layouts_are_within_the_limits(space):
    first = space.initial()[0]
    assert (first.workers, first.envs, first.env_processes) == (0, 1, 0)
    assert first.frames_per_batch == space.frames
    found = space.everything()
    assert len(set(found)) == len(found)
    for each in found:
        assert max(each.workers, each.env_processes) <= space.processes
        assert space.max_envs is None or each.total_envs <= space.max_envs
        assert not each.workers or space.sync in (None, each.sync)
        assert each.prefetch in (0, 1)
        assert not each.prefetch or (space.learner and each.sync)
        assert not (each.workers and each.env_processes)
        envs = each.total_envs if each.sync else each.envs
        assert each.frames_per_batch >= envs
        assert each.frames_per_batch % envs == 0
        assert not space.fixed_frames or 0 <= each.frames_per_batch - space.frames < envs
        assert each.env_processes == 0 or each.envs % each.env_processes == 0


def test_a_compiled_policy_is_tried_without_compiling():
    space = SearchSpace(processes=2, frames=1000, compiled=True)
    first = space.initial()[0]
    (other,) = (each for each in space.neighbours(first) if not each.compiled)
    assert other.label == "one process, 1 env, not compiled"
    assert str(other) == "one process with 1 environment and no compile_policy"
    assert other.chosen({"compile_policy": True, "device": "cpu"}) == {"device": "cpu"}
    assert first.chosen({"compile_policy": True}) == {"compile_policy": True}
    assert all(each.compiled for each in SearchSpace(processes=2, frames=1000).everything())


def test_two_cores():
    labels = [each.label for each in SearchSpace(processes=2, frames=1000).initial()]
    assert labels == [
        "one process, 1 env",
        "one process, 16 envs",
        "2 workers x 16 envs, sync",
        "2 workers x 16 envs, async",
        "ParallelEnv, 2 x 16 envs",
        "one process, 4 envs",
        "2 workers x 4 envs, sync",
        "2 workers x 4 envs, async",
        "ParallelEnv, 2 x 4 envs",
        "2 workers x 1 env, sync",
        "2 workers x 1 env, async",
        "ParallelEnv, 2 x 1 env",
    ]


def test_one_core_needs_no_processes_unless_there_is_a_learner():
    """With one, a worker and prefetch are tried."""
    assert {each.workers for each in SearchSpace(processes=1, frames=100).everything()} == {0}
    found = SearchSpace(processes=2, frames=100, learner=True).initial()
    assert {each.prefetch for each in found} == {0, 1}
    assert {each.workers for each in found} == {0, 1, 2}


def test_many_cores_are_approached_from_two_sides():
    space = SearchSpace(processes=64, frames=1000)
    assert {each.workers for each in space.initial()} == {0, 16, 64}
    best = Candidate(workers=64, frames_per_batch=1024)
    near = space.neighbours(best)
    assert {each.workers for each in near} == {32, 63, 64}
    assert [each.frames_per_batch for each in near if each.workers == 64] == [4096]
    assert all(each.sync for each in near)


def test_an_environment_that_waits_gets_more_processes_than_cores():
    assert (most_processes(2, False), most_processes(2, True)) == (2, 16)
    assert most_processes(100, True) == 100


def test_batched_environments_are_not_put_into_lists():
    space = space_for(
        cores=4, waits=False, batched=True, frames=100, fixed_frames=False,
        max_workers=None, max_envs=None, sync=None, learner=False,
    )  # fmt: skip
    assert space.envs_per_process == (1,)
    assert space.processes == 4


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_only_usable_cores_count():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert usable_cores() == len(before)
