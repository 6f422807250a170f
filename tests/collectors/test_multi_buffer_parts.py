"""Workers and the replay buffer of their collector: its rows, and its figures."""

import pytest
import torch

from trawl.collectors import MultiAsyncCollector, MultiSyncCollector
from trawl.testing import NumberedEnv

data = pytest.importorskip("torchrl.data")

KINDS = [MultiSyncCollector, MultiAsyncCollector]


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_a_row_of_both_environments(kind):
    """As one collector of two environments writes them."""
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100, ndim=2))
    options = {"frames_per_batch": 16, "total_frames": 32, "extend_buffer": False}
    with kind([[NumberedEnv] * 2] * 2, replay_buffer=buffer, **options) as collector:
        list(collector)
    assert len(buffer) == 32
    assert buffer[:].batch_size == (2, 16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("envs", "total", "random"), [(1, 17, 7), (1, 3, 0), (2, 17, 7)])
def test_single_frames_end_exactly_at_the_step(kind, envs, total, random):
    """Workers of one environment end at the frame, and those of several at the step."""

    def act(observation):
        return torch.eye(4, dtype=torch.int64)[2].expand(*observation.shape[:-1], 4)

    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100, ndim=1 if envs == 1 else 2))
    with kind(
        [NumberedEnv if envs == 1 else [NumberedEnv] * envs] * 2,
        act,
        frames_per_batch=24,
        total_frames=total,
        init_random_frames=random,
        replay_buffer=buffer,
        extend_buffer=False,
        start_method="inline",
    ) as collector:
        list(collector)
        assert collector.stats()["frames"] == len(buffer) == total + total % envs
    others = NumberedEnv.action_numbers(buffer[:]) != 2
    assert others.sum() <= random + random % envs
    assert bool(others.any()) == bool(random)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_answer_for_the_buffer(kind, tmp_path):
    storage = data.LazyMemmapStorage(100, scratch_dir=tmp_path)
    buffer = data.ReplayBuffer(storage=storage)
    with kind(
        [NumberedEnv] * 2, frames_per_batch=8, total_frames=32, replay_buffer=buffer
    ) as collector:
        list(collector)
        assert collector.map_fn("replay_buffer.__len__") == [32, 32]
        assert collector.get_distant_attr("replay_buffer.write_count") == [32, 32]


def test_trajectories_in_a_buffer_say_the_storing_device():
    class Buffer(data.ReplayBuffer):
        def extend(self, frames, **options):
            seen.append(frames.device)
            return super().extend(frames, **options)

    seen = []
    buffer = Buffer(storage=data.LazyTensorStorage(200))
    with MultiSyncCollector(
        [NumberedEnv] * 2,
        frames_per_batch=40,
        total_frames=80,
        replay_buffer=buffer,
        trajs_per_batch=2,
        storing_device="cpu",
    ) as collector:
        list(collector)
    assert set(seen) == {torch.device("cpu")}
