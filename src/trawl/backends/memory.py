"""Shared memory without a name.

Processes can reach the memory only through a descriptor. The kernel frees the memory when the last
process that uses it has ended, for whatever reason.

A worker gets all pages of its own part with one system call (:func:`populate`) before it collects,
so that it doesn't stop at each page. If the system has no memory left, this call fails with a
``MemoryError``, where a write would end the process. Blocks of 2 MiB or more ask for huge pages,
with which new memory arrives about ten times faster. Linux grants them for shared memory only if
``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is ``advise``, ``within_size`` or ``always``.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import weakref
from multiprocessing import reduction
from typing import Any

from trawl.memory import ask_for_huge_pages

# The same number on all architectures; Python has no name for it.
_POPULATE_WRITE = getattr(mmap, "MADV_POPULATE_WRITE", 23)


class SharedMemory:
    """Anonymous shared memory, initially filled with zeros.

    Args:
        fd: the descriptor of existing memory; this object closes it.
        nbytes: size of the memory in bytes.

    Attributes:
        fd: the descriptor, which can be sent to other processes.
        buffer: the memory.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        weakref.finalize(self, os.close, fd)
        self.buffer = _mapped(fd, nbytes)

    @classmethod
    def new(cls, nbytes: int) -> SharedMemory:
        """Allocates new memory."""
        fd = _nameless_file()
        os.ftruncate(fd, max(nbytes, 1))
        return cls(fd, nbytes)

    def reserve(self, start: int, nbytes: int) -> None:
        """Makes sure that there is memory for a range, if :func:`populate` could not tell.

        Raises:
            MemoryError: if the system has no memory for the range.
        """
        if CAN_POPULATE:
            return
        try:
            os.posix_fallocate(self.fd, start, nbytes)
        except OSError as error:
            raise _no_memory(nbytes) from error

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that is being started gets the descriptor at once. Other processes request it.
        return _received, (reduction.DupFd(self.fd), self.nbytes)


def _received(descriptor: Any, nbytes: int) -> SharedMemory:
    return SharedMemory(descriptor.detach(), nbytes)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("trawl", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def map_once(fd: int, nbytes: int) -> mmap.mmap:
    """Maps the memory behind a descriptor, and closes the descriptor."""
    try:
        return _mapped(fd, nbytes)
    finally:
        os.close(fd)


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        # A mapping stays valid without a descriptor. Earlier Python versions keep a duplicate.
        memory = mmap.mmap(fd, max(nbytes, 1), trackfd=False)
    else:
        memory = mmap.mmap(fd, max(nbytes, 1))
    # By default, Linux grants no huge pages for shared memory, and ignores the request.
    ask_for_huge_pages(memory)
    return memory


def populate(memory: mmap.mmap, start: int, stop: int) -> None:
    """Gets all pages for bytes that the caller is about to write, which is faster than one by one.

    The kernel takes the pages from the memory that is nearest to the processor of the caller.

    Args:
        memory: the memory. Its content does not change.
        start: offset of the first byte.
        stop: offset after the last byte. No other process may write to these bytes meanwhile.

    Raises:
        MemoryError: if the system has no memory for the pages. Without this call, writing to them
            would end the process.
    """
    first = start - start % mmap.PAGESIZE
    if not CAN_POPULATE:
        for page in (start, *range(first + mmap.PAGESIZE, stop, mmap.PAGESIZE)):
            memory[page] = memory[page]
        return
    try:
        memory.madvise(_POPULATE_WRITE, first, stop - first)
    except OSError as error:
        raise _no_memory(stop - start) from error


def _no_memory(nbytes: int) -> MemoryError:
    return MemoryError(
        f"the system has no shared memory for {nbytes:,} more bytes: use smaller batches, or keep "
        "fewer of them"
    )


def _can_populate() -> bool:
    try:
        mmap.mmap(-1, mmap.PAGESIZE).madvise(_POPULATE_WRITE)
    except OSError:
        return False
    return True


#: False on Linux before 5.14.
CAN_POPULATE = _can_populate()
