"""Steps that an environment spends on resetting are no experience, wherever batches go."""

from __future__ import annotations

from collector_parts import Buffer
from torchrl.data import LazyTensorStorage, ReplayBuffer

from trawl.collectors import Collector, split_trajectories
from trawl.testing import NumberedEnv, SelfResettingVectorEnv


def env() -> SelfResettingVectorEnv:
    return SelfResettingVectorEnv(
        [lambda: NumberedEnv(lengths=[2]), lambda: NumberedEnv(lengths=[3])]
    )


def test_such_steps_are_masked_and_not_counted() -> None:
    with Collector(env(), frames_per_batch=24) as collector:
        batch = collector.next()
        assert batch["collector", "mask"].sum() == collector.stats()["frames"] < batch.numel()


def test_a_replay_buffer_gets_experience_only() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    with Collector(env(), frames_per_batch=24, replay_buffer=buffer) as collector:
        collector.next()
        frames = collector.stats()["frames"]
    stored = buffer[:]
    assert len(buffer) == frames
    assert (stored["collector", "traj_ids"] >= 0).all()
    assert ("collector", "mask") not in stored.keys(True)


def test_single_steps_into_a_buffer_are_experience_only() -> None:
    buffer = Buffer()
    with Collector(
        env(), frames_per_batch=24, replay_buffer=buffer, extend_buffer=False
    ) as collector:
        collector.next()
        assert len(buffer) == collector.stats()["frames"]
    assert all((item["collector", "traj_ids"] >= 0).all() for item in buffer.frames)


def test_split_trajectories_have_experience_only() -> None:
    with Collector(env(), frames_per_batch=24) as collector:
        batch = collector.next()
        frames = collector.stats()["frames"]
    split = split_trajectories(batch)
    mask = split["collector", "mask"]
    assert mask.sum() == frames
    assert (split["collector", "traj_ids"][mask] >= 0).all()
