"""Whole trajectories out of what Ray actors collect."""

import os
import signal

import pytest
from multi_parts import LENGTHS, envs
from whole_parts import TRAJ_IDS, Episodes, cycling, rows_of

from trawl.collectors.distributed import RayCollector
from trawl.testing import NumberedEnv

pytestmark = pytest.mark.usefixtures("cluster")


def collector(source=None, sync=True, **options):
    options = {"trajs_per_batch": 3, "traj_format": "cat", "frames_per_batch": 14, **options}
    options.setdefault("remote_configs", {"num_cpus": 0, "memory": 0})
    return RayCollector(source or envs(2), sync=sync, **options)


@pytest.mark.parametrize(("sync", "layout"), [(True, "padded"), (False, "cat")])
def test_they_come_once_and_in_order(sync, layout):
    episodes = Episodes(cycling(LENGTHS))
    with collector(sync=sync, traj_format=layout, total_frames=140) as there:
        for batch in there:
            assert episodes.add(batch) == 3
        assert there.stats()["frames"] == 140
    assert all(found == list(range(len(found))) for found in episodes.by_env.values())
    assert 140 - 5 * 5 < episodes.frames <= 140


def test_an_actor_that_is_killed():
    with collector(sync=False, trajs_per_batch=1) as there:
        found = [there.next()]
        (pid,) = there._pool.call({1: (_pid,)}).values()
        os.kill(pid, signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match=r"worker 1 .*a new worker takes its place"):
            found += _until_one_is_replaced(there)
        found += [there.next() for _ in range(40)]
    # The environment in its place begins with its first episode again; ids go on.
    ids = [int(batch[TRAJ_IDS][0]) for batch in found]
    assert len(set(ids)) == len(ids)
    for batch in found:
        numbers = NumberedEnv.numbers(batch)
        assert numbers[:, 2].tolist() == list(range(LENGTHS[numbers[0, 1] % 3]))
        assert batch["next", "done"].flatten().tolist() == [False] * (len(batch) - 1) + [True]


def _until_one_is_replaced(collector):
    found = []
    while not collector.stats()["restarts"]:
        found.append(collector.next())
    return found


def _pid(collector):
    return os.getpid()


@pytest.mark.parametrize(
    ("kind", "count"), [pytest.param("sync", 2, marks=pytest.mark.long), ("async", 2)]
)
def test_workers_with_workers(kind, count):
    with collector(
        envs(count),
        sync=kind == "sync",
        collector_class=kind,
        num_workers_per_collector=2,
        frames_per_batch=28,
        trajs_per_batch=1,
    ) as there:
        rows = [row for _ in range(60) for row in rows_of(there.next())]
    ids = [int(row[TRAJ_IDS][0]) for row in rows]
    assert len(set(ids)) == len(ids)
    seen = []
    for row in rows:
        numbers = NumberedEnv.numbers(row)
        assert numbers[:, 2].tolist() == list(range(LENGTHS[numbers[0, 1] % 3]))
        seen.append(tuple(numbers[0, :2].tolist()))
    # Two environments of each number: each episode comes from both, but for the last ones, and
    # for those that one of them came to much sooner.
    assert all(seen.count(one) <= 2 for one in seen)
    assert sum(seen.count(one) == 2 for one in seen) > (30 if kind == "sync" else 0)


def test_actors_that_are_added():
    episodes = Episodes(cycling(LENGTHS))
    with collector(envs(3)[:1], sync=False) as there:
        episodes.add(there.next())
        there.add_collectors(envs(3)[1:])
        for _ in range(40):
            episodes.add(there.next())
    assert set(episodes.by_env) == {0, 1, 2}
    assert all(found == list(range(len(found))) for found in episodes.by_env.values())


def test_they_go_into_a_buffer_on_the_cluster():
    from functools import partial

    data = pytest.importorskip("torchrl.data")
    from trawl.data import RayReplayBuffer

    buffer = RayReplayBuffer(storage=partial(data.LazyTensorStorage, 1000))
    episodes = Episodes(cycling(LENGTHS))
    how = {"replay_write_mode": "trajectory", "trajs_per_write": 2, "track_policy_version": True}
    none = {"trajs_per_batch": None, "traj_format": None}
    with collector(replay_buffer=buffer, total_frames=140, **none, **how) as there:
        assert set(there) == {None}
        progress = there.progress
        assert there.worker_policy_versions() == {0: 0, 1: 0}
    episodes.add(buffer[:])
    assert progress.stepped_frames == 140
    assert progress.trajectory_pending_frames == 140 - progress.trajectory_completed_frames
    assert progress.completed_trajectories == len(episodes.found)
    assert progress.replay_written_frames == episodes.frames == len(buffer)
    buffer.close()
    assert all(found == list(range(len(found))) for found in episodes.by_env.values())
    assert 140 - 2 * 5 < episodes.frames <= 140


def test_where_they_are_put_together_is_not_to_be_chosen():
    with pytest.raises(ValueError, match="collector_kwargs has 'trajs_per_batch'"):
        collector(collector_kwargs={"trajs_per_batch": 2})


def test_actors_end_at_the_last_frame():
    with collector(sync=False, trajs_per_batch=1, total_frames=41, exact_frames=True) as there:
        assert sum(len(batch) for batch in there) <= 41
        assert there.stats()["frames"] == 41
