"""Shared memory without a name.

Processes can reach the memory only through a descriptor. The kernel frees the memory when the last
process that uses it has ended, for whatever reason.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import weakref
from multiprocessing import reduction
from typing import Any


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
        return mmap.mmap(fd, max(nbytes, 1), trackfd=False)
    return mmap.mmap(fd, max(nbytes, 1))
