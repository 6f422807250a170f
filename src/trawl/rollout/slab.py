"""Blocks of memory that batches live in, leased to the user and recycled after.

A batch that was delivered stays valid for as long as anything refers to it: every tensor of it
keeps its storage, the storage keeps the array it was made from, and when that array dies the
block goes back to its pool. Nobody has to copy a batch to keep it.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trawl.keys import Key
from trawl.rollout.layout import Layout, Place

# Two blocks serve the usual loop: one is being filled while the last is still held.
_KEEP = 2


class Lease:
    """One use of a block: tensors and arrays over the same memory.

    Attributes:
        tensors: a tensor of the whole batch for each key.
    """

    def __init__(self, layout: Layout, owner: NDArray[np.uint8]) -> None:
        self.layout = layout
        self.tensors: dict[Key, Tensor] = {
            key: _tensor(owner.data, place) for key, place in layout.places.items()
        }


def _tensor(memory: memoryview, place: Place) -> Tensor:
    """A leaf, with a storage of its own: what is saved or copied of it is not the whole block.

    The view of memory in between keeps numpy from seeing through to the block, so that the
    lease lasts as long as any of its tensors.
    """
    if not place.nbytes:
        return torch.empty(place.shape, dtype=place.dtype)
    part = np.frombuffer(memory[place.offset : place.offset + place.nbytes], dtype=np.uint8)
    return torch.from_numpy(part).view(place.dtype).view(place.shape)


class SlabPool:
    """Blocks for the batches of one layout.

    The pool grows while the user keeps batches, and shrinks to two spare blocks when they go.

    Args:
        layout: what the blocks hold.
        recycle: whether blocks are used again; otherwise each batch gets memory of its own.

    Attributes:
        leased: blocks that are in use now.
    """

    def __init__(self, layout: Layout, recycle: bool = True) -> None:
        self.layout = layout
        self.leased = 0
        self._recycle = recycle
        self._free: list[bytearray] = []

    def lease(self) -> Lease:
        """A block nobody else refers to. Its content is undefined."""
        block = self._free.pop() if self._free else bytearray(self.layout.nbytes + 64)
        whole = np.frombuffer(block, dtype=np.uint8)
        skip = -whole.ctypes.data % 64
        owner = np.frombuffer(block, dtype=np.uint8, count=self.layout.nbytes, offset=skip)
        del whole
        self.leased += 1
        # The pool may be gone before the batch is: the batch must not keep it alive.
        done = weakref.finalize(owner, _give_back, weakref.ref(self), block)
        done.atexit = False
        return Lease(self.layout, owner)

    @property
    def nbytes(self) -> int:
        """Bytes held by this pool, leased and spare."""
        return (self.leased + len(self._free)) * self.layout.nbytes


def _give_back(pool_ref: weakref.ref[SlabPool], block: bytearray) -> None:
    # May run in any thread, at any time: list operations are atomic, and that is enough.
    pool = pool_ref()
    if pool is not None:
        pool.leased -= 1
        if pool._recycle and len(pool._free) < _KEEP:
            pool._free.append(block)
