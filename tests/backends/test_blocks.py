"""Blocks of shared memory."""

import gc
import mmap
import threading

import numpy as np
import pytest
from backend_parts import held_files
from hypothesis import given
from hypothesis import strategies as st

from trawl.backends.blocks import BlockAllocator
from trawl.backends.memory import SharedMemory


def test_a_thousand_blocks_take_few_descriptors():
    before = held_files()
    blocks = BlockAllocator(SharedMemory.new)
    kept = [blocks.allocate(100).buffer for _ in range(1000)]
    assert held_files() - before < 30
    for number, array in enumerate(kept):
        array[:] = number % 251
    assert all((array == number % 251).all() for number, array in enumerate(kept))


def test_a_slot_is_taken_again_once_no_view_of_it_is_left():
    blocks = BlockAllocator(SharedMemory.new)
    block = blocks.allocate(100)
    file, offset, view = block.file, block.offset, block.buffer[3:7]
    view[:] = 9
    del block
    others = [blocks.allocate(100) for _ in range(file.slots - 1)]
    assert (file, offset) not in [(other.file, other.offset) for other in others]
    assert (view == 9).all()
    del others, view
    again = [blocks.allocate(100) for _ in range(file.slots)]
    (taken,) = [one for one in again if (one.file, one.offset) == (file, offset)]
    assert not taken.buffer.any()


def test_a_block_for_which_there_is_no_memory_leaves_its_slot_free(monkeypatch):
    def fail(memory, start, nbytes):
        raise MemoryError("none left")

    allocator = BlockAllocator(SharedMemory.new)
    file = allocator.allocate(100).file
    monkeypatch.setattr(SharedMemory, "reserve", fail)
    for _ in range(2 * file.slots):
        with pytest.raises(MemoryError, match="none left"):
            allocator.allocate(100)
    monkeypatch.undo()
    kept = [allocator.allocate(100) for _ in range(file.slots)]
    assert {block.file for block in kept} == {file}


def test_files_are_closed_when_their_blocks_are_gone():
    before = held_files()
    blocks = BlockAllocator(SharedMemory.new)
    kept = [blocks.allocate(100) for _ in range(100)]
    last = kept[-1].buffer
    del kept, blocks
    gc.collect()
    assert before < held_files() <= before + 2
    del last
    gc.collect()
    assert held_files() <= before


def test_an_allocator_lets_go_of_files_that_are_not_in_use():
    before = held_files()
    blocks = BlockAllocator(SharedMemory.new)
    kept = [blocks.allocate(100) for _ in range(100)]
    several = held_files() - before
    del kept
    gc.collect()
    assert held_files() - before < several


@given(st.lists(st.one_of(st.sampled_from([0, 1, 5_000, 9_000]), st.none()), max_size=60))
def test_blocks_never_overlap(steps):
    """Allocates a block of a size, or lets go of the oldest (None)."""
    blocks, kept = BlockAllocator(SharedMemory.new), []
    for number, nbytes in enumerate(steps, 1):
        if nbytes is None:
            del kept[:1]
            continue
        array = blocks.allocate(nbytes).buffer
        assert len(array) >= max(nbytes, 1)
        assert len(array) % mmap.PAGESIZE == 0
        assert not array.any()
        array[:] = number
        kept.append((number, array))
    assert all((array == number).all() for number, array in kept)


def test_several_threads_allocate_and_let_go():
    blocks, failed = BlockAllocator(SharedMemory.new), []

    def work(number):
        for _ in range(300):
            arrays = [blocks.allocate(100).buffer for _ in range(5)]
            for array in arrays:
                array[:] = number
            if not all((np.asarray(array) == number).all() for array in arrays):
                failed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
