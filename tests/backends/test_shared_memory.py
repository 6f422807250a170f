"""Memory without a name."""

import gc
import os

import numpy as np
import pytest
from backend_parts import held_files

from trawl.backends.memory import SharedMemory, map_once


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 1_000_001])
def test_zeros_of_the_size(nbytes):
    memory = SharedMemory.new(nbytes)
    assert memory.nbytes == nbytes
    assert len(memory.buffer) == max(nbytes, 1)
    assert not any(memory.buffer[:])


def test_two_mappings_are_one_memory():
    memory = SharedMemory.new(100)
    other = np.frombuffer(map_once(os.dup(memory.fd), 100), np.uint8)
    memory.buffer[3] = 9
    assert other[3] == 9
    other[4] = 8
    assert memory.buffer[4] == 8


def test_a_mapping_outlives_its_origin():
    memory = SharedMemory.new(100)
    array = np.frombuffer(memory.buffer, np.uint8)
    del memory
    array[:] = 1
    assert array.sum() == 100


def test_it_has_no_name():
    before = set(os.listdir("/dev/shm"))
    memory = SharedMemory.new(1 << 20)
    memory.buffer[0] = 1
    assert set(os.listdir("/dev/shm")) == before
    assert not os.get_inheritable(memory.fd)


def test_descriptors_are_closed_with_the_last_user():
    before = held_files()
    memories = [SharedMemory.new(100) for _ in range(10)]
    arrays = [np.frombuffer(map_once(os.dup(m.fd), 100), np.uint8) for m in memories]
    assert held_files() > before
    del memories, arrays
    gc.collect()
    assert held_files() <= before


def test_a_mapping_that_fails_leaves_no_descriptor():
    before = held_files()
    read, write = os.pipe()
    with pytest.raises(PermissionError):
        map_once(read, 100)
    with pytest.raises(PermissionError):
        SharedMemory(write, 100)
    gc.collect()
    assert held_files() <= before
