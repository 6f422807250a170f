"""Blocks of shared memory, which are used again once nothing refers to them any more."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Function that allocates shared memory of a number of bytes: an object with a ``buffer``, and a
#: method ``reserve`` that makes sure that the system has memory for a range.
NewMemory = Callable[[int], Any]

_PAGE = mmap.PAGESIZE
_FEWEST_SLOTS = 4
_MOST_BYTES = 256 << 20  # limit for a file that has more than one slot


class BlockAllocator:
    """Allocates blocks of shared memory. Blocks of the same size share files.

    Args:
        new: function that allocates the memory of a file.

    Examples:
        >>> from trawl.backends.memory import SharedMemory
        >>> blocks = BlockAllocator(SharedMemory.new)
        >>> one, other = blocks.allocate(100), blocks.allocate(100)
        >>> one.file is other.file
        True
    """

    def __init__(self, new: NewMemory) -> None:
        self._new = new
        self._files: dict[int, list[BlockFile]] = {}

    def allocate(self, nbytes: int) -> SharedBlock:
        """Returns a block of zeros, whose size is ``nbytes`` rounded up to whole pages.

        Raises:
            MemoryError: if the system has no memory for it. Linux since 5.14 can't tell yet; then
                :func:`trawl.backends.memory.populate` raises the error.
        """
        size = -(-max(nbytes, 1) // _PAGE) * _PAGE
        files = self._files.setdefault(size, [])
        # Iterates over a copy, because blocks that are freed meanwhile may change the list.
        for file in reversed(files.copy()):
            if (block := file.allocate_slot()) is not None:
                return block
        slots = max(_FEWEST_SLOTS, sum(file.slots for file in files))
        slots = max(1, min(slots, _MOST_BYTES // size))
        files.append(BlockFile(size, slots, files, self._new(size * slots)))
        return self.allocate(nbytes)


class BlockFile:
    """A piece of anonymous memory that is divided into slots of one size.

    Args:
        size: size of a slot in bytes, a multiple of the page size.
        slots: number of slots.
        siblings: the files of this size, the newest last. When an older file is no longer in use,
            it is removed from this list and thereby freed.
        memory: the shared memory that contains the slots.

    Attributes:
        number: number that identifies the file within this process.
        memory: the shared memory that contains the slots.
    """

    _numbers = itertools.count()

    def __init__(self, size: int, slots: int, siblings: list[BlockFile], memory: Any) -> None:
        self.number = next(self._numbers)
        self.slots = slots
        self.memory = memory
        self._size = size
        self._siblings = siblings
        self._free = deque(range(slots))

    def allocate_slot(self) -> SharedBlock | None:
        """Returns a free slot as a block, or None if all are in use.

        Raises:
            MemoryError: if the system has no memory for the block.
        """
        try:
            slot = self._free.popleft()
        except IndexError:
            return None
        offset = slot * self._size
        try:
            self.memory.reserve(offset, self._size)
        except MemoryError:
            self._free.append(slot)
            raise
        array = np.frombuffer(self.memory.buffer, np.uint8, self._size, offset)
        # Every view of the block keeps this array alive.
        weakref.finalize(array, self._release, slot).atexit = False
        return SharedBlock(self, offset, array)

    def _release(self, slot: int) -> None:
        # May run in any thread at any time, so each of these operations is atomic.
        _clear(self.memory.buffer, slot * self._size, self._size)
        self._free.append(slot)
        files = self._siblings
        if len(self._free) == self.slots and files[-1] is not self:
            with contextlib.suppress(ValueError):  # another thread removed it
                files.remove(self)


class SharedBlock:
    """A block of shared memory.

    Attributes:
        file: the file that contains the block.
        offset: offset of the block in the file, in bytes.
        buffer: the memory of the block. When nothing refers to this array any more, the slot is
            free again.
    """

    def __init__(self, file: BlockFile, offset: int, buffer: NDArray[np.uint8]) -> None:
        self.file = file
        self.offset = offset
        self.buffer = buffer


def _clear(memory: Any, offset: int, size: int) -> None:
    """Gives the pages back to the system. Afterwards, they read as zeros."""
    try:
        memory.madvise(mmap.MADV_REMOVE, offset, size)
    except (AttributeError, OSError):
        # There is no MADV_REMOVE, or the file system can't punch holes into files.
        np.frombuffer(memory, np.uint8, size, offset)[:] = 0
