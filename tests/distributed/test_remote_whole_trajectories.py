"""Whole trajectories out of what ranks and RPC workers collect."""

from functools import partial
from itertools import cycle, islice

import pytest
from distributed_parts import CLASSES, EACH, kill_one, make
from multi_parts import LENGTHS, envs
from whole_parts import TRAJ_IDS, Episodes, Writes, cycling

from trawl.testing import FaultyEnv, NumberedEnv


def collector(cls, sync, **options):
    options = {"trajs_per_batch": 3, "traj_format": "cat", "frames_per_batch": 14, **options}
    return make(cls, create_env_fn=envs(2), policy=None, sync=sync, **options)


def test_they_go_into_a_buffer():
    buffer, episodes = Writes(), Episodes(cycling(LENGTHS))
    options = {"replay_buffer": buffer, "total_frames": 140, "trajs_per_write": 2}
    with collector(CLASSES[1], False, **options) as there:
        assert set(there) == {None}
    assert {episodes.add(written) for written in buffer.written} <= {1, 2}
    assert all(found == list(range(len(found))) for found in episodes.by_env.values())
    assert 140 - 2 * 5 < episodes.frames <= 140


@pytest.mark.parametrize(("cls", "sync"), EACH)
def test_a_worker_that_is_killed(cls, sync):
    with collector(cls, sync, trajs_per_batch=1, total_frames=420) as there:
        found = [there.next()]
        kill_one(there, 1)
        with pytest.warns(RuntimeWarning, match=r"worker 1 .*a new worker takes"):
            found += there
        assert there.stats()["frames"] == 420
    ids = [int(batch[TRAJ_IDS][0]) for batch in found]
    assert len(set(ids)) == len(ids)
    for batch in found:
        numbers = NumberedEnv.numbers(batch)
        assert numbers[:, 2].tolist() == list(range(LENGTHS[numbers[0, 1] % 3]))
        assert batch["next", "done"].flatten().tolist() == [False] * (len(batch) - 1) + [True]
    # Of each of three lives the last episode may be missing.
    assert 420 - 3 * max(LENGTHS) < sum(map(len, found)) <= 420


@pytest.mark.filterwarnings("ignore:.*rebuilt because of on_env_error:RuntimeWarning")
@pytest.mark.parametrize("nested", [1, pytest.param(2, marks=pytest.mark.long)])
def test_those_that_a_failure_ends_between_batches_are_delivered(nested):
    options = {"num_workers_per_collector": nested, "collector_class": "sync"} if nested > 1 else {}
    faulty = partial(FaultyEnv, 4, ZeroDivisionError("worn out"), lengths=[3])
    with make(
        CLASSES[0],
        create_env_fn=faulty,
        num_workers=1,
        policy=None,
        sync=True,
        frames_per_batch=2 * nested,
        trajs_per_batch=1,
        traj_format="cat",
        on_env_error="restart",
        **options,
    ) as there:
        found = [there.next() for _ in range(8)]
    # Each environment ends one episode, and fails in the second step of the next one.
    expected = [(3, False)] * nested + [(1, True)] * nested
    assert [(len(one), bool(one["next", "truncated"][-1])) for one in found] == [
        *islice(cycle(expected), 8)
    ]
