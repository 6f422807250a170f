"""Memory of blocks, and the alignment of arrays within a block."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Mask = NDArray[np.bool_]

# In bytes: a cache line, which is wide enough for every SIMD load.
ALIGNMENT = 64
# Memory of this size or more asks for huge pages, which usually have this size.
_HUGE_PAGE = 2 << 20


class Memory(Protocol):
    """Memory of a block, private to this process or shared with others.

    Attributes:
        buffer: the memory, as an object with the buffer protocol.
    """

    @property
    def buffer(self) -> Any:
        """The memory, as an object with the buffer protocol."""


class PrivateMemory:
    """Zero-filled memory of at least one byte that is private to this process."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.buffer: Any = _huge(nbytes) if nbytes >= _HUGE_PAGE else bytearray(max(nbytes, 1))


def _huge(nbytes: int) -> Any:
    """Returns memory that asks for huge pages, with which a batch is written faster."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytearray(nbytes)
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_huge_pages(memory)
    return memory


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Asks for huge pages if the memory is large enough and the system has them."""
    if len(memory) >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # Linux may have been built without them.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


def aligned(nbytes: int) -> int:
    """Returns ``nbytes``, rounded up to a multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
