"""Workers that are killed while whole trajectories are assembled from their frames."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos_parts import (
    LENGTHS,
    Acting,
    Crew,
    Once,
    Trouble,
    act,
    collector_of,
    frames_of,
    kill,
    replaced,
    strike,
)
from modes import ASYNC
from tensordict import TensorDictBase

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "collectors"))

from whole_parts import Episodes, Writes, cycling

ANY_KILLED = r"worker \d was killed by SIGKILL"


def whole_of(crew: Crew, sync: bool, policy: Any = None, **options: Any) -> Any:
    options = {"trajs_per_batch": 3, "traj_format": "cat", **options}
    return collector_of(crew, sync, policy, **options)


def check_lives(episodes: Episodes, frames: int, crew: Crew) -> None:
    """Checks that each life of an environment delivered its first episodes, and lost at most one.

    The missing frames belong to trajectories that a death cut off, that had not ended when the
    collection ended, or that did not fill a batch.
    """
    by_env = episodes.by_env
    assert all(found == list(range(len(found))) for found in by_env.values())
    places = crew.workers * crew.lanes
    lives = {
        (worker, lane): len(makers[lane].lives.pids)
        for worker, makers in enumerate(crew.makers)
        for lane in range(crew.lanes)
    }
    lost = frames - episodes.frames
    assert 0 <= lost <= max(LENGTHS) * (sum(lives.values()) + 2)
    assert len({number % 100 for number in by_env}) == places


@pytest.mark.parametrize(
    ("sync", "lanes", "at", "count"),
    [
        (True, 1, "make", 0),
        (False, 3, "reset", 0),
        (True, 3, "reset", 3),
        (False, 1, "step", 0),
        (True, 3, "step", 9),
    ],
)
def test_killed_in_an_environment(
    tmp_path: Path, sync: bool, lanes: int, at: str, count: int
) -> None:
    crew = Crew(tmp_path, lanes=lanes, troubles={1: Trouble(at, count)})
    episodes, frames = Episodes(cycling(LENGTHS)), frames_of(sync, crew, 5)
    with (
        replaced("worker 1 was killed by SIGKILL", times=1),
        whole_of(crew, sync, act, total_frames=frames) as collector,
    ):
        for batch in collector:
            assert episodes.add(batch) == 3
        facts = collector.stats()
    assert (facts["frames"], facts["restarts"]) == (frames, 1)
    assert facts["trajectories"] == len(episodes.found)
    check_lives(episodes, frames, crew)


@ASYNC
def test_killed_from_outside_at_any_moment(tmp_path: Path, sync: bool) -> None:
    crew = Crew(tmp_path, workers=3)
    episodes, frames = Episodes(cycling(LENGTHS)), frames_of(sync, crew, 12)
    with whole_of(crew, sync, act, total_frames=frames, traj_format="padded") as collector:
        with replaced(ANY_KILLED):
            for number, batch in enumerate(collector):
                episodes.add(batch)
                if number % 4 == 1:
                    strike(crew.pid(number % 3))
        assert collector.stats()["frames"] == frames
    check_lives(episodes, frames, crew)


@pytest.mark.parametrize(("sync", "count"), [(True, 0), (False, 4), (True, 17)])
def test_killed_in_the_policy_while_a_buffer_is_filled(
    tmp_path: Path, sync: bool, count: int
) -> None:
    crew, buffer = Crew(tmp_path), Writes()
    episodes, frames = Episodes(cycling(LENGTHS)), frames_of(sync, crew, 6)
    policy = Acting(Once(tmp_path / "policy", count, kill))
    with (
        replaced(ANY_KILLED, times=1),
        whole_of(
            crew, sync, policy, total_frames=frames, replay_buffer=buffer, traj_format=None
        ) as collector,
    ):
        assert set(collector) == {None}
        assert collector.stats()["trajectories_waiting"] == 0
    for written in buffer.written:
        episodes.add(written)
    check_lives(episodes, frames, crew)


def test_killed_while_a_shared_buffer_is_filled(tmp_path: Path) -> None:
    # Here the driver writes. If workers wrote, a death during a write would end the collection.
    data = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(1000), shared=True)
    crew = Crew(tmp_path, troubles={0: Trouble("step", 13), 1: Trouble("reset", 2)})
    episodes, frames = Episodes(cycling(LENGTHS)), frames_of(False, crew, 6)
    with (
        replaced(ANY_KILLED, times=2),
        whole_of(
            crew, False, act, total_frames=frames, replay_buffer=buffer, traj_format=None
        ) as collector,
    ):
        assert set(collector) == {None}
    episodes.add(buffer[:])
    check_lives(episodes, frames, crew)


def test_killed_while_others_are_broken_off(tmp_path: Path) -> None:
    crew = Crew(tmp_path, workers=3, troubles={2: Trouble("step", 5), 0: Trouble("step", 12)})
    episodes, frames = Episodes(cycling(LENGTHS)), frames_of(True, crew, 6)
    collector = whole_of(crew, True, act, total_frames=frames, preemptive_threshold=0.5)
    with collector, replaced(ANY_KILLED):
        for batch in collector:
            episodes.add(batch)
        seen = collector.stats()["frames"]
    assert seen >= frames
    assert all(found == list(range(len(found))) for found in episodes.by_env.values())
    assert episodes.frames <= seen


def test_killed_between_two_batches_of_one_round(tmp_path: Path) -> None:
    """A trajectory that waits when its worker dies is delivered once."""
    crew = Crew(tmp_path, workers=1)
    episodes: Episodes = Episodes(cycling(LENGTHS))

    def take(collector: Any) -> TensorDictBase:
        batch = collector.next()
        episodes.add(batch)
        return batch

    with whole_of(crew, True, act, trajs_per_batch=1) as collector:
        take(collector)
        assert collector.stats()["trajectories_waiting"] == 1
        strike(crew.pid(0))
        take(collector)
        with replaced(ANY_KILLED, times=1):
            take(collector)
    # The worker died during the third episode, which is lost.
    assert episodes.found == [(0, 0), (0, 1), (100, 0)]
