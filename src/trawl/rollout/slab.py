"""Blocks of memory for batches, leased to the user and then recycled.

A delivered batch stays valid as long as anything refers to it. Each of its tensors keeps a storage
alive, and the storage keeps alive the array from which it was made. When this array dies, the block
returns to its pool, in any thread, and whatever refers to the memory. Users need not copy a batch
to keep it.

A pool of private memory keeps two spare blocks. New shared memory costs more, because each worker
has to map it and the kernel clears its pages. A pool of shared memory therefore keeps up to eight
more, for users who hold several batches and release them together, and frees those that 16 batches
in a row did not need.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trawl.keys import Key
from trawl.memory import ALIGNMENT, Memory, PrivateMemory
from trawl.rollout.layout import Layout

# Two blocks are enough for the usual loop: one is filled while the user holds the previous one.
_KEEP = 2
# Number of leases after which spare blocks that none of them needed are freed.
_WINDOW = 16


@dataclass(frozen=True)
class Lease:
    """One use of a block.

    Attributes:
        layout: layout of the batch.
        tensors: a tensor of the whole batch for each key, and the pools of frames.
        memory: the block.
        pool_starts: first row of the batch's own part in each pool of frames, by key.
        rows: the tensors with time first, if this is their order in memory; otherwise None.
    """

    layout: Layout
    tensors: Mapping[Key, Tensor]
    memory: Any = None
    pool_starts: Mapping[Key, int] = field(default_factory=dict)
    rows: Mapping[Key, Tensor] | None = None


def tensors_over(layout: Layout, buffer: Any) -> tuple[dict[Key, Tensor], NDArray[np.uint8]]:
    """Returns the tensors of a batch in a block, and the array that dies with the last tensor.

    The block must have the size that :func:`needed_bytes` returns. A shared block has the same
    offsets in every process.
    """
    owner = np.frombuffer(buffer, dtype=np.uint8, count=layout.nbytes, offset=_skipped(buffer))
    return tensors_in(layout, owner), owner


def _skipped(buffer: Any) -> int:
    """Returns the number of bytes before the first aligned byte of a buffer."""
    return -np.frombuffer(buffer, dtype=np.uint8).ctypes.data % ALIGNMENT


def tensors_in(layout: Layout, block: NDArray[np.uint8]) -> dict[Key, Tensor]:
    """Returns the tensors of a batch in its block; the tensors keep ``block`` alive."""
    # Half the time of ``torch.frombuffer``. Each tensor has a storage of its own, so that saving it
    # doesn't save the whole block. Its array refers to ``block``.
    tensors = {
        key: torch.from_numpy(np.ndarray(shape, dtype, block, offset))
        for key, (shape, dtype, offset) in layout.arrays.items()
    }
    for key in layout.bfloat16:
        tensors[key] = tensors[key].view(torch.bfloat16)
    return tensors


def byte_ranges(tensors: Iterable[Tensor], buffer: Any) -> Iterator[tuple[int, int]]:
    """Yields the bytes of tensors in a buffer, as ranges of offsets."""
    base = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    for tensor in tensors:
        if not tensor.is_contiguous():
            # Between its rows, there are other data.
            yield from byte_ranges(tensor, buffer)
        elif tensor.numel():
            start = tensor.data_ptr() - base
            yield start, start + tensor.nbytes


def needed_bytes(layout: Layout) -> int:
    """Returns the size in bytes of a block in which the batch can be aligned."""
    return layout.nbytes + ALIGNMENT


class _Bytes(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of a block, which keep a weak reference to the leased array until the array dies."""

    end: _LeaseEnd


class _LeaseEnd(weakref.ref["NDArray[np.uint8]"]):
    """Weak reference to a leased array, whose callback returns the block to the pool."""

    __slots__ = ("block", "skipped")
    block: Memory
    skipped: int


class SlabPool:
    """Pool of blocks for the batches of one layout.

    The pool grows while the user keeps batches, and shrinks to its spare blocks when the batches
    are released. The block that was released last is leased first, because its memory is the most
    likely to be in a cache.

    Args:
        layout: layout of the batches.
        recycle: True to reuse blocks; otherwise each batch gets new memory.
        allocate: function that allocates a block of the given number of bytes.
        keep: number of spare blocks to keep.
        keep_needed: number of spare blocks to keep while they are needed from time to time, which
            matters if new memory is costly; at least ``keep``.
    """

    def __init__(
        self,
        layout: Layout,
        recycle: bool = True,
        allocate: Callable[[int], Memory] = PrivateMemory,
        keep: int = _KEEP,
        keep_needed: int = 0,
    ) -> None:
        self.layout = layout
        self._allocate = allocate
        self._keep = keep
        # When the deque exceeds this length, it drops its oldest entry, and thereby the block.
        self._spare: deque[_LeaseEnd] = deque(maxlen=max(keep, keep_needed) if recycle else 0)
        # Number of spare blocks that none of the latest leases needed, and the number of leases.
        self._unneeded = self._lately = 0
        self._leases: list[weakref.ref[NDArray[np.uint8]]] = []
        self._most_leases = 0

    def lease(self, content: NDArray[np.uint8] | None = None) -> Lease:
        """Leases a block that nothing else refers to.

        Args:
            content: bytes to copy to the block; None to leave them undefined.
        """
        if self._spare:
            spare = self._spare.pop()
            block, skipped = spare.block, spare.skipped
        else:
            block = self._allocate(needed_bytes(self.layout))
            skipped = _skipped(block.buffer)
        self._drop_unneeded()
        memory = np.frombuffer(block.buffer, np.uint8).view(_Bytes)
        # An array over ``memory`` itself would keep the block's bytes alive, but not ``memory``.
        owner = np.frombuffer(memory.data, np.uint8, self.layout.nbytes, skipped)
        tensors = tensors_in(self.layout, owner)
        if content is not None:
            owner[...] = content
        # The array may die in any thread, at any time. The callback is atomic C code, because
        # Python would drop a KeyboardInterrupt that arrives during a finaliser written in Python.
        memory.end = _LeaseEnd(owner, self._spare.append)
        memory.end.block, memory.end.skipped = block, skipped
        self._note(owner)
        return Lease(self.layout, tensors, block)

    def _drop_unneeded(self) -> None:
        """Frees spare blocks that have not been needed for a while."""
        spare = len(self._spare)
        self._unneeded, self._lately = min(self._unneeded, spare), self._lately + 1
        if self._lately >= _WINDOW:
            # The leased block will be spare, too. Other threads only add blocks, at the other end.
            for _ in range(self._unneeded + 1 - self._keep):
                self._spare.popleft()
            self._unneeded, self._lately = len(self._spare), 0

    def _note(self, owner: NDArray[np.uint8]) -> None:
        if len(self._leases) > self._most_leases:
            self._leases = [lease for lease in self._leases if lease() is not None]
            self._most_leases = 2 * len(self._leases) + _KEEP
        self._leases.append(weakref.ref(owner))

    def describe(self) -> dict[str, int]:
        """Returns the number of blocks in use, and the size of all blocks in bytes."""
        return {"batches_held": self.leased, "memory_bytes": self.nbytes}

    @property
    def leased(self) -> int:
        """Number of blocks in use."""
        return sum(lease() is not None for lease in self._leases)

    @property
    def nbytes(self) -> int:
        """Size of the pool's blocks, leased and spare, in bytes."""
        return (self.leased + len(self._spare)) * self.layout.nbytes
