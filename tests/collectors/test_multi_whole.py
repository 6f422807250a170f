"""Whole trajectories out of what several processes collect."""

from __future__ import annotations

from typing import Any

import pytest
from multi_parts import BOTH, LENGTHS, PLACES, envs, make
from whole_parts import Episodes, cycling, rows_of


@BOTH
def test_a_reset_of_a_worker_drops_what_it_had_not_finished(cls: Any) -> None:
    episodes = Episodes(cycling([7]))
    with make(
        cls,
        create_env_fn=envs(2, lengths=[7]),
        frames_per_batch=10,
        total_frames=400,
        trajs_per_batch=2,
        traj_format="cat",
    ) as collector:
        for number, batch in enumerate(collector):
            episodes.add(batch)
            if number % 5 == 2:
                collector.reset([True, False])
                collector.get_distant_attr("worker_idx")
    by_env = episodes.by_env
    assert by_env[1] == list(range(len(by_env[1])))
    assert by_env[0] == sorted(by_env[0])
    assert len(by_env[0]) < by_env[0][-1] + 1, "no episode was broken off"


@PLACES
def test_control_calls_lose_no_trajectory(cls: Any, method: str) -> None:
    """Batches that were ordered before a state is loaded come after it, of other episodes."""
    episodes, found = Episodes(cycling(LENGTHS)), []
    options = {"trajs_per_batch": 2, "traj_format": "cat", "start_method": method}
    with make(cls, frames_per_batch=10, total_frames=200, **options) as collector:
        for number, batch in enumerate(collector):
            episodes.add(batch)
            if number % 3 == 0:
                state = collector.state_dict()
                assert set(state) >= {"worker0", "worker1", "trajectories"}
                assert collector.stats("both")["workers_alive"] == 2
                assert collector.map_fn("env.batch_size.numel") == [1, 1]
                assert collector.get_distant_attr("worker_idx") == [0, 1]
                collector.update_policy_weights_()
    assert all(found == list(range(len(found))) for found in episodes.by_env.values())
    assert len(episodes.found) > 55
    with make(cls, frames_per_batch=6, total_frames=-1, **options) as collector:
        collector.load_state_dict(state)
        for _ in range(6):
            found += [collector.next() for _ in range(5)]
            collector.load_state_dict(state)
        found += [collector.next() for _ in range(10)]
    for batch in found:
        for row in rows_of(batch):
            # A whole episode, which may have come before.
            Episodes(cycling(LENGTHS)).add(row)


# --- TorchRL's buffers


def test_a_shared_buffer_is_filled_as_well() -> None:
    data = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(1000), shared=True)
    episodes = Episodes(cycling(LENGTHS))
    with make(
        frames_per_batch=20,
        total_frames=200,
        trajs_per_batch=2,
        replay_buffer=buffer,
        start_method="forkserver",
    ) as collector:
        assert list(collector) == [None] * 10
    episodes.add(buffer[:])
    assert all(found == list(range(len(found))) for found in episodes.by_env.values())
    assert episodes.frames == len(buffer) > 180
