"""Memory that several processes share, and that has no name.

A descriptor is all that leads to it. When the last process that has one is gone, so is the
memory, however these processes ended.
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
    """Anonymous shared memory; zeros, at first.

    Args:
        fd: the descriptor of memory that exists; this object closes it.
        nbytes: its size.

    Attributes:
        fd: the descriptor, to be sent to other processes.
        buffer: the memory.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        weakref.finalize(self, os.close, fd)
        self.buffer = _mapped(fd, nbytes)

    @classmethod
    def new(cls, nbytes: int) -> SharedMemory:
        """Allocates memory."""
        fd = _nameless_file()
        os.ftruncate(fd, max(nbytes, 1))
        return cls(fd, nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        # To a process that is being started the descriptor goes along; to another one by request.
        return _received, (reduction.DupFd(self.fd), self.nbytes)


def _received(descriptor: Any, nbytes: int) -> SharedMemory:
    return SharedMemory(descriptor.detach(), nbytes)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("trawl", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def map_once(fd: int, nbytes: int) -> mmap.mmap:
    """The memory behind a descriptor, which is closed."""
    try:
        return _mapped(fd, nbytes)
    finally:
        os.close(fd)


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        # A mapping is valid without a descriptor. Earlier versions keep one of their own.
        return mmap.mmap(fd, max(nbytes, 1), trackfd=False)
    return mmap.mmap(fd, max(nbytes, 1))
