"""Workers with large observations: when memory is got from the system, and when there is none."""

import mmap
import resource

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from trawl.backends import memory
from trawl.backends.processes import worker as process_worker
from trawl.collectors import MultiAsyncCollector, MultiSyncCollector

BOTH = pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
PAGES = 256


class Faulting(gymnasium.Env):
    """Observations of 1 MB, which begin with the number of page faults of the process so far."""

    observation_space = spaces.Box(0, 2**62, (PAGES * mmap.PAGESIZE // 8,), np.int64)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self):
        self.obs = np.zeros(self.observation_space.shape, np.int64)

    def observe(self):
        self.obs[0] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return self.obs

    def reset(self, *, seed=None, options=None):
        return self.observe(), {}

    def step(self, action):
        return self.observe(), 0.0, False, False, {}


def act(observation):
    return torch.zeros(1)


def no_memory(memory, start, stop):
    raise MemoryError("no shared memory")


def break_memory():
    process_worker.populate = no_memory


def make(cls, **options):
    frames = 16 if cls is MultiSyncCollector else 8
    return cls([Faulting] * 2, act, frames_per_batch=frames, total_frames=-1, **options)


@pytest.mark.skipif(not memory.CAN_POPULATE, reason="Linux before 5.14")
@BOTH
@pytest.mark.parametrize("how", ["stack", -1])
def test_pages_of_new_memory_are_got_at_once(cls, how):
    if cls is MultiAsyncCollector:
        how = None
    with make(cls, cat_results=how) as collector:
        kept = [collector.next() for _ in range(3)]
    for batch in kept:
        faults = batch["next", "observation"][..., 0].reshape(-1, 8)
        assert (faults[:, -1] - faults[:, 0] < PAGES).all()


@BOTH
def test_memory_that_a_worker_does_not_get_is_an_error(cls):
    with (
        make(cls, init_fn=break_memory) as collector,
        pytest.raises(MemoryError, match="no shared memory"),
    ):
        collector.next()


@BOTH
def test_batches_that_are_held_and_released_together_need_no_new_memory(cls):
    with make(cls) as collector:
        for _ in range(3):
            held = [collector.next() for _ in range(6)]
            del held
        before = set().union(*(slot.known for slot in collector._pool.slots))
        for _ in range(5):
            held = [collector.next() for _ in range(6)]
            del held
        assert set().union(*(slot.known for slot in collector._pool.slots)) <= before
