"""Workers that are killed while whole trajectories are assembled from their frames.

That each trajectory is whole, and none comes twice, is compared with the oracle.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos_parts import LENGTHS, Crew, Trouble, act, collector_of, frames_of, replaced
from killing import strike

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "collectors"))

from whole_parts import Episodes, cycling

ANY_KILLED = r"worker \d was killed by SIGKILL"


def test_killed_while_a_shared_buffer_is_filled(tmp_path: Path) -> None:
    # Here the driver writes. If workers wrote, a death during a write would end the collection.
    data = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(1000), shared=True)
    crew = Crew(tmp_path, troubles={0: Trouble("step", 13), 1: Trouble("reset", 2)})
    episodes, frames = Episodes(cycling(LENGTHS)), frames_of(False, crew, 6)
    options = {"total_frames": frames, "replay_buffer": buffer, "trajs_per_batch": 3}
    with (
        replaced(ANY_KILLED, times=2),
        collector_of(crew, False, act, **options) as collector,
    ):
        assert set(collector) == {None}
        assert collector.stats()["trajectories_waiting"] == 0
    episodes.add(buffer[:])
    assert all(found == list(range(len(found))) for found in episodes.by_env.values())
    # Each life lost one trajectory at most.
    assert 0 <= frames - episodes.frames <= max(LENGTHS) * (4 + 2)


def test_killed_between_two_batches_of_one_round(tmp_path: Path) -> None:
    """A trajectory that waits when its worker dies is delivered once."""
    crew = Crew(tmp_path, workers=1)
    episodes = Episodes(cycling(LENGTHS))

    def take(collector: Any) -> None:
        episodes.add(collector.next())

    with collector_of(crew, True, trajs_per_batch=1, traj_format="cat") as collector:
        take(collector)
        assert collector.stats()["trajectories_waiting"] == 1
        strike(crew.pid(0))
        take(collector)
        with replaced(ANY_KILLED, times=1):
            take(collector)
    # The worker died during the third episode, which is lost.
    assert episodes.found == [(0, 0), (0, 1), (100, 0)]
