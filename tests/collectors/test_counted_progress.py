"""The counts of frames and trajectories in ``stats()``, which states keep."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from collector_parts import Buffer, by_step
from whole_parts import Writes

from trawl import Collector, MultiSyncCollector
from trawl.collectors import AsyncBatchedCollector, MultiAsyncCollector
from trawl.testing import NumberedEnv, SelfResettingVectorEnv

LENGTHS = [3, 1, 5]
CUMULATIVE = (
    "stepped_frames",
    "trajectory_completed_frames",
    "completed_trajectories",
    "replay_written_frames",
)
PENDING = "trajectory_pending_frames"


def env(number: int = 0) -> Any:
    return partial(NumberedEnv, number, lengths=LENGTHS)


def single(**options: Any) -> Collector:
    return Collector(env(), by_step(), frames_per_batch=7, **options)


def batched(**options: Any) -> Collector:
    return Collector([env(0), env(1)], by_step(), frames_per_batch=14, **options)


def sync(**options: Any) -> MultiSyncCollector:
    return MultiSyncCollector(
        [env(0), env(1)], by_step(), frames_per_batch=14, start_method="inline", **options
    )


def asynchronous(**options: Any) -> MultiAsyncCollector:
    return MultiAsyncCollector(
        [env()], by_step(), frames_per_batch=7, start_method="inline", **options
    )


def ready(**options: Any) -> AsyncBatchedCollector:
    return AsyncBatchedCollector(
        [env()], policy=by_step(), frames_per_batch=7, backend="threading", **options
    )


#: Each with the number of its environments.
MAKERS = {single: 1, batched: 2, sync: 2, asynchronous: 1, ready: 1}
EVERYWHERE = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


def counts(collector: Any) -> dict[str, int]:
    facts = collector.stats()
    return {name: facts[name] for name in (*CUMULATIVE, PENDING)}


def expected(steps: int, lanes: int = 1, written: int = 0) -> dict[str, int]:
    """The counts after so many steps of each environment."""
    ended = frames = 0
    while frames + LENGTHS[ended % len(LENGTHS)] <= steps:
        frames += LENGTHS[ended % len(LENGTHS)]
        ended += 1
    values = (steps, frames, ended, written, steps - frames)
    return {name: lanes * value for name, value in zip((*CUMULATIVE, PENDING), values, strict=True)}


@EVERYWHERE
def test_frames_and_trajectories_are_counted(make: Any) -> None:
    lanes = MAKERS[make]
    with make(total_frames=35 * lanes) as collector:
        assert counts(collector) == dict.fromkeys((*CUMULATIVE, PENDING), 0)
        for number, _ in enumerate(collector, 1):
            found = counts(collector)
            # Asynchronous workers are ahead.
            assert found["stepped_frames"] >= collector.stats()["frames"]
            if make is not asynchronous:
                assert found == expected(7 * number, lanes)
        assert counts(collector) == expected(35, lanes)
    assert counts(collector) == expected(35, lanes) | {PENDING: 0}


#: What is written of 35 steps of an environment, by the options.
WRITTEN: list[tuple[dict[str, Any], int]] = [
    ({"replay_write_mode": "rollout"}, 35),
    ({"replay_write_mode": "trajectory"}, 31),
    ({"postproc": lambda batch: batch.reshape(-1)[::7]}, 5),
    ({"extend_buffer": False}, 35),
]


@EVERYWHERE
def test_what_is_written_is_counted(make: Any) -> None:
    lanes = MAKERS[make]
    for options, written in WRITTEN:
        with make(total_frames=35 * lanes, replay_buffer=Buffer(), **options) as collector:
            list(collector)
            assert counts(collector) == expected(35, lanes, written)


def test_whole_trajectories_that_wait_are_not_pending() -> None:
    with single(total_frames=35, trajs_per_batch=11, traj_format="cat") as collector:
        collector.next()
        assert counts(collector) == expected(35)


@pytest.mark.parametrize("make", [single, batched, sync, asynchronous], ids=lambda m: m.__name__)
def test_resets_drop_the_frames_of_unfinished_trajectories(make: Any) -> None:
    lanes = MAKERS[make]
    with make(total_frames=14 * lanes) as collector:
        next(iter(collector))
        before = counts(collector)
        assert before[PENDING]
        collector.reset()
        assert counts(collector) == before | {PENDING: 0}
        collector.next()
        collector.set_seed(3)
        assert counts(collector)[PENDING] == 0
    with batched(total_frames=28) as collector:
        collector.next()
        collector.reset(index=0)
        assert counts(collector) == expected(7, 2) | {PENDING: expected(7)[PENDING]}


@EVERYWHERE
def test_states_have_the_counts(make: Any) -> None:
    lanes = MAKERS[make]
    options = {"total_frames": 28 * lanes, "replay_write_mode": "trajectory"}
    with make(replay_buffer=Writes(), **options) as whole:
        for _ in whole:
            pass
        at_the_end = counts(whole)
    with make(replay_buffer=Writes(), **options) as first:
        first.next()
        first.next()
        state, before = first.state_dict(), counts(first)
        assert state["collector_progress"] == before
    with make(replay_buffer=Writes(), **options) as second:
        second.next()
        second.load_state_dict(state)
        assert counts(second) == before | {PENDING: 0}
        for _ in second:
            pass
        # An asynchronous worker may have taken all of them before the state.
        same = CUMULATIVE if make is asynchronous else (*CUMULATIVE, PENDING)
        assert {name: counts(second)[name] for name in same} == {
            name: at_the_end[name] for name in same
        }


def test_states_without_counts_have_the_frames() -> None:
    with single(total_frames=35) as collector:
        collector.next()
        state = collector.state_dict()
        del state["collector_progress"]
        collector.load_state_dict(state)
        found = counts(collector)
    assert found == dict.fromkeys((*CUMULATIVE, PENDING), 0) | {"stepped_frames": 7}


def test_frames_of_a_rollout_are_counted_as_taken() -> None:
    for make in (single, sync):
        with make() as collector:
            collector.next()
            collector.rollout() if make is single else collector.map_fn("rollout")
            assert counts(collector) == expected(14, MAKERS[make])
            assert collector.stats()["frames"] == 7 * MAKERS[make]


def test_statistics_of_each_worker_have_the_counts() -> None:
    with sync(total_frames=28) as collector:
        collector.next()
        facts = collector.stats("per_worker")
        for index in range(2):
            for name, value in expected(7).items():
                assert facts[f"worker_{index}/{name}"] == value


@pytest.mark.parametrize("snapshots", [0, 1])
def test_a_replacement_of_a_worker_is_counted_once(snapshots: int) -> None:
    options = {"start_method": "forkserver", "worker_snapshots": snapshots}
    with MultiSyncCollector([env()], by_step(), frames_per_batch=7, **options) as collector:
        collector.next()
        collector.next()
        before = counts(collector)
        collector._pool.slots[0].worker.kill()
        with pytest.warns(RuntimeWarning, match="a new worker takes its place"):
            collector.next()
        found = counts(collector)
        if snapshots:
            assert found == expected(21)
        else:
            # New episodes begin.
            ended = {name: before[name] + expected(7)[name] for name in CUMULATIVE}
            assert found == ended | {PENDING: expected(7)[PENDING]}


@pytest.mark.parametrize("make", [single, ready], ids=lambda make: make.__name__)
def test_views_of_a_collector_without_workers(make: Any) -> None:
    with make(total_frames=14) as collector:
        collector.next()
        assert collector.stats(workers="per_worker") == {}
        assert collector.stats(workers="both").keys() == collector.stats().keys()
        with pytest.raises(ValueError, match="workers must be 'aggregate', 'per_worker' or 'both'"):
            collector.stats(workers="all")


def test_rows_without_a_frame_are_not_counted() -> None:
    vector = SelfResettingVectorEnv([env(0), env(1)])
    with Collector(vector, frames_per_batch=20, total_frames=40) as collector:
        frames = sum(int(batch["collector", "mask"].sum()) for batch in collector)
        found = counts(collector)
    assert found["stepped_frames"] == frames == collector.stats()["frames"]
