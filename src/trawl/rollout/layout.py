"""Where the leaves of a batch lie in its block of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trawl.keys import Key

# Wide enough for every SIMD load, and a cache line.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Leaf:
    """One entry of a frame.

    Attributes:
        shape: shape of the entry in a single frame of a single environment.
        dtype: dtype of the entry.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Place:
    """A leaf's place in the block: offset and size in bytes, and the shape of the whole batch."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Layout:
    """The shape of a batch: batch dimensions, then time, then each leaf's own.

    Args:
        leaves: what a frame consists of, by key.
        batch: batch size of the environment, ``()`` for a single one.
        steps: frames of each environment in a batch.

    Attributes:
        places: the place of each leaf, by key.
        nbytes: size of the block.
    """

    def __init__(self, leaves: Mapping[Key, Leaf], batch: tuple[int, ...], steps: int) -> None:
        self.leaves = dict(leaves)
        self.batch = batch
        self.steps = steps
        self.places: dict[Key, Place] = {}
        offset = 0
        for key, leaf in self.leaves.items():
            shape = (*batch, steps, *leaf.shape)
            nbytes = torch.Size(shape).numel() * leaf.dtype.itemsize
            self.places[key] = Place(offset, nbytes, shape, leaf.dtype)
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = offset
