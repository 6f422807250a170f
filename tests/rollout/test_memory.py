"""Who owns the memory of a batch, and when it is used again."""

import gc
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trawl.collectors import Collector
from trawl.memory import PrivateMemory
from trawl.rollout.layout import BatchPartition, Layout, Leaf
from trawl.rollout.slab import SlabPool, byte_ranges, tensors_over
from trawl.testing import NumberedEnv


def one():
    return NumberedEnv(lengths=[5])


def collector(source, frames_per_batch=30, **options):
    return Collector(source(), frames_per_batch=frames_per_batch, **options)


def test_the_usual_loop_alternates_between_two_blocks():
    places = set()
    with collector(one) as collecting:
        batch = collecting.next()
        for _ in range(10):
            places.add(batch["observation"].data_ptr())
            batch = collecting.next()  # while the last one is still held
    assert len(places) == 2


def test_memory_shrinks_when_batches_that_were_kept_go():
    with collector(one) as collecting:
        held = [collecting.next() for _ in range(12)]
        most = collecting.stats()
        held.clear()
        least = collecting.stats()
    assert (most["batches_held"], least["batches_held"]) == (12, 0)
    assert least["memory_bytes"] * 6 == most["memory_bytes"]
    # Without buffers, each batch has memory of its own.
    with collector(one, use_buffers=False) as collecting:
        collecting.next()
        assert collecting.stats()["memory_bytes"] == 0


class Failing(NumberedEnv):
    """Fails in its fourth step."""

    def step(self, action):
        if len(self.actions) == 3:
            raise RuntimeError("no more")
        return super().step(action)


@pytest.mark.parametrize("options", [{}, {"frame_stack": 2}, {"normalize_observations": True}])
@pytest.mark.parametrize("source", [Failing, [Failing] * 2])
def test_a_batch_that_fails_gives_its_memory_back(source, options):
    with Collector(source, frames_per_batch=4000, **options) as collecting:
        with pytest.raises(RuntimeError, match="no more"):
            collecting.next()
        assert collecting.stats()["memory_bytes"] > 0
        assert collecting.stats()["batches_held"] == 0


def test_no_python_runs_when_a_batch_is_released():
    """A KeyboardInterrupt would be lost in it: Python only prints errors of finalisers."""
    calls = []
    with collector(one) as collecting:
        batches = [collecting.next() for _ in range(4)]
        sys.setprofile(lambda frame, event, _: calls.append((event, frame.f_code.co_name)))
        try:
            batches.clear()
        finally:
            sys.setprofile(None)
        assert collecting.stats()["batches_held"] == 0
    assert [name for event, name in calls if event == "call"] == []


class Forgetful(NumberedEnv):
    """Keeps no list of the actions that it got."""

    def step(self, action):
        found = super().step(action)
        self.actions.clear()
        return found


def test_nothing_small_stays_of_a_batch():
    """Eight bytes of each frame would be 58 KB; what is kept of the last 255 batches is kept."""
    with Collector([Forgetful() for _ in range(2)], frames_per_batch=4) as collecting:
        tracemalloc.start()
        try:
            for _ in range(600):
                collecting.next()
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(1800):
                collecting.next()
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert after - before < 40_000


leaves = st.dictionaries(
    st.text("abcd", min_size=1, max_size=3).map(lambda name: (name,)),
    st.builds(
        Leaf,
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.float64, torch.bool, torch.uint8, torch.bfloat16]),
    ),
    min_size=1,
    max_size=6,
)


@given(
    leaves=leaves, batch=st.lists(st.integers(1, 3), max_size=2).map(tuple), steps=st.integers(1, 7)
)
def test_entries_of_a_block_are_aligned_and_apart(leaves, batch, steps):
    lease = SlabPool(Layout(leaves, batch, steps)).lease()
    for number, tensor in enumerate(lease.tensors.values()):
        tensor.fill_(number % 2)
    for number, (key, tensor) in enumerate(lease.tensors.items()):
        assert tensor.shape == (*batch, steps, *leaves[key].shape)
        assert tensor.dtype == leaves[key].dtype
        assert not tensor.numel() or tensor.data_ptr() % 64 == 0
        assert (tensor == number % 2).all()


def test_a_block_comes_back_only_when_the_last_of_its_tensors_is_gone():
    pool = SlabPool(
        Layout({("a",): Leaf((4,), torch.float32), ("b",): Leaf((), torch.bool)}, (), 3)
    )
    tensors = pool.lease().tensors
    part = tensors[("a",)][1:, 2]
    assert pool.leased == 1
    del tensors
    assert pool.leased == 1
    del part
    assert pool.leased == 0


@pytest.mark.parametrize("how", ["stack", 0, -1])
def test_the_bytes_of_workers_are_all_bytes_of_entries_once(how):
    leaves = {("a",): Leaf((3,), torch.float64), ("b",): Leaf((), torch.uint8)}
    partition = BatchPartition(Layout(leaves, (2,), 8), [8, 8], how)
    memory = bytearray(partition.whole.nbytes + 64)
    tensors, _ = tensors_over(partition.whole, memory)
    array = np.frombuffer(memory, np.uint8)
    for index in range(2):
        for start, stop in byte_ranges(partition.part(index, tensors).values(), memory):
            array[start:stop] += index + 1
    for tensor in tensors.values():
        assert not (tensor.view(torch.uint8) == 0).any()
    for index in range(2):
        for tensor in partition.part(index, tensors).values():
            assert (tensor.contiguous().view(torch.uint8) == index + 1).all()
    assert np.bincount(array)[1:].tolist() == [8 * 2 * 25] * 2


def small_pool(**options):
    return SlabPool(Layout({("a",): Leaf((4,), torch.float32)}, (), 3), **options)


def test_the_block_that_was_released_last_is_leased_first():
    pool = small_pool(keep=3)
    leases = [pool.lease() for _ in range(3)]
    blocks = [lease.memory for lease in leases]
    for number in (1, 0, 2):
        leases[number] = None
    again = [pool.lease() for _ in range(3)]
    assert [blocks.index(lease.memory) for lease in again] == [2, 0, 1]


@pytest.mark.parametrize("count", [3, 8])
def test_blocks_that_are_needed_from_time_to_time_are_kept(count):
    made = []

    def allocate(nbytes):
        made.append(PrivateMemory(nbytes))
        return made[-1]

    pool = small_pool(allocate=allocate, keep_needed=8)
    for _ in range(20):
        held = [pool.lease() for _ in range(count)]
        del held
    assert len(made) == count


def test_blocks_that_are_no_longer_needed_are_freed():
    pool = small_pool(keep_needed=8)
    held = [pool.lease() for _ in range(20)]
    one = pool.nbytes / 20
    del held
    assert pool.nbytes == 8 * one
    for _ in range(40):
        pool.lease()
    assert pool.nbytes == 2 * one


def test_a_pool_may_go_before_its_blocks():
    pool = SlabPool(Layout({("a",): Leaf((4,), torch.float32)}, (), 3))
    tensor = pool.lease().tensors[("a",)].fill_(7)
    del pool
    gc.collect()
    assert (tensor == 7).all()
    del tensor
