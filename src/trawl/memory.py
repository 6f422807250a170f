"""Memory of blocks, and the alignment of arrays within a block."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Mask = NDArray[np.bool_]

# In bytes: a cache line, which is wide enough for every SIMD load.
ALIGNMENT = 64


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
        self.buffer = bytearray(max(nbytes, 1))


def aligned(nbytes: int) -> int:
    """Returns ``nbytes``, rounded up to a multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
