"""Memory without a name; that it is shared and zero is tested with the backends."""

import errno
import gc
import mmap
import os
import resource

import numpy as np
import pytest
from backend_parts import held_files

from trawl.backends import memory
from trawl.backends.memory import SharedMemory, map_once


def test_it_has_no_name():
    memory = SharedMemory.new(1 << 20)
    memory.buffer[0] = 1
    assert os.readlink(f"/proc/self/fd/{memory.fd}").startswith("/memfd:")
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


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.fixture(params=[True, False], ids=["at once", "page by page"])
def populating(request, monkeypatch):
    if request.param and not memory.CAN_POPULATE:
        pytest.skip("Linux before 5.14")
    monkeypatch.setattr(memory, "CAN_POPULATE", request.param)


def test_populated_pages_need_not_be_got_one_by_one(populating):
    pages = 2000
    shared = SharedMemory.new(pages * mmap.PAGESIZE)
    array = np.frombuffer(shared.buffer, np.uint8)
    memory.populate(shared.buffer, 5, pages * mmap.PAGESIZE - 5)
    before = faults()
    array[:: mmap.PAGESIZE] = 1
    assert faults() - before < pages / 10


@pytest.mark.parametrize("start", [0, 1, mmap.PAGESIZE - 1, mmap.PAGESIZE])
@pytest.mark.parametrize("size", [1, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 1])
def test_populating_changes_nothing(populating, start, size):
    shared = SharedMemory.new(10 * mmap.PAGESIZE)
    array = np.frombuffer(shared.buffer, np.uint8)
    array[:] = np.arange(len(array)) % 251
    expected = array.copy()
    memory.populate(shared.buffer, start, start + size)
    assert (array == expected).all()


@pytest.mark.skipif(not memory.CAN_POPULATE, reason="Linux before 5.14")
def test_memory_that_is_not_there_is_an_error_and_no_signal():
    shared = SharedMemory.new(10 * mmap.PAGESIZE)
    os.ftruncate(shared.fd, mmap.PAGESIZE)
    with pytest.raises(MemoryError, match="no shared memory for 40,960 more bytes"):
        memory.populate(shared.buffer, 0, 10 * mmap.PAGESIZE)


def test_without_populating_memory_is_reserved(monkeypatch):
    shared = SharedMemory.new(10 * mmap.PAGESIZE)
    monkeypatch.setattr(memory, "CAN_POPULATE", False)
    shared.reserve(mmap.PAGESIZE, 3 * mmap.PAGESIZE)
    assert os.fstat(shared.fd).st_blocks * 512 == 3 * mmap.PAGESIZE

    def full(*_):
        raise OSError(errno.ENOSPC, "none left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError, match="no shared memory for 7 more bytes"):
        shared.reserve(0, 7)


def flags_of(memory):
    """The flags that the kernel shows for a mapping."""
    begin = np.frombuffer(memory.buffer, np.uint8).ctypes.data
    with open("/proc/self/smaps") as file:
        lines = iter(file)
        next(line for line in lines if line.startswith(f"{begin:x}-"))
        return next(line for line in lines if line.startswith("VmFlags:")).split()


@pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="no huge pages in this kernel"
)
def test_large_memory_asks_for_huge_pages():
    assert "hg" in flags_of(SharedMemory.new(8 << 20))
    assert "hg" not in flags_of(SharedMemory.new(1 << 20))
