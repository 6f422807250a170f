"""Workers and the replay buffer of their collector: its rows, and its figures."""

import pytest
import torch
from multi_parts import BOTH, CLASSES, make

from trawl.collectors import MultiSyncCollector
from trawl.testing import NumberedEnv

data = pytest.importorskip("torchrl.data")


@BOTH
@pytest.mark.parametrize(
    ("envs", "total", "random"), [(1, 17, 7), (1, 3, 0), (2, 17, 7), (2, 32, 0)]
)
def test_single_frames_end_exactly_at_the_step(cls, envs, total, random):
    """Workers of one environment end at the frame, and those of several at the step.

    Each step is a row of both environments, as one collector of two environments writes them.
    """

    def act(observation):
        return torch.eye(4, dtype=torch.int64)[2].expand(*observation.shape[:-1], 4)

    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100, ndim=1 if envs == 1 else 2))
    with cls(
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
        frames = total + total % envs
        assert collector.stats()["frames"] == len(buffer) == frames
    assert buffer[:].batch_size == ((frames,) if envs == 1 else (2, frames // 2))
    others = NumberedEnv.action_numbers(buffer[:]) != 2
    assert others.sum() <= random + random % envs
    assert bool(others.any()) == bool(random)


@pytest.mark.parametrize(("cls", "total"), [(CLASSES[0], 1), (CLASSES[1], 41)])
def test_workers_that_write_themselves_answer_for_the_buffer(cls, total):
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100), shared=True)
    options = {"frames_per_batch": 12, "total_frames": total, "exact_frames": True}
    options |= {"replay_buffer": buffer, "set_truncated": True}
    with make(cls, lanes=3, start_method="forkserver", **options) as collector:
        list(collector)
        assert collector.stats()["frames"] == len(buffer) == total
        assert collector.map_fn("replay_buffer.__len__") == [total] * 2
        assert collector.get_distant_attr("replay_buffer.write_count") == [total] * 2


def test_trajectories_in_a_buffer_say_the_storing_device():
    class Buffer(data.ReplayBuffer):
        def extend(self, frames, **options):
            seen.append(frames.device)
            return super().extend(frames, **options)

    seen = []
    options = {"replay_buffer": Buffer(storage=data.LazyTensorStorage(200)), "trajs_per_batch": 2}
    with make(
        MultiSyncCollector,
        create_env_fn=[NumberedEnv] * 2,
        frames_per_batch=40,
        total_frames=80,
        storing_device="cpu",
        **options,
    ) as collector:
        list(collector)
    assert set(seen) == {torch.device("cpu")}
