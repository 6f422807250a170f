"""One batch in the making: where steps are written, and how it is delivered."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from trawl.keys import Key
from trawl.rollout.layout import Layout, layout_of
from trawl.rollout.slab import Lease
from trawl.tensordicts import tensordict_of

Array = NDArray[Any]

# A step of a batch of environments writes one row for each of them, and in the batch as it is
# delivered these lie far apart. Small entries are therefore written side by side, and put in
# their places together at the end; of large ones (images) each row fills cache lines anyway.
_STAGED_BYTES = 1024


class Block:
    """The memory of a batch while it is being filled.

    Args:
        lease: the memory that will be delivered.

    Attributes:
        lease: that memory.
        rows: arrays with time first, ``(steps, *batch, *leaf)``, by key.
        lanes: the same with the batch as one dimension, ``(steps, lanes, *leaf)``.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        layout = lease.layout
        axis = len(layout.batch)
        self._staged = {
            key: torch.empty(_time_first(layout, key), dtype=layout.leaves[key].dtype)
            for key in staged_keys(layout)
        }
        self._tensors: dict[Key, Tensor] = {
            key: self._staged.get(key, tensor.movedim(axis, 0) if axis else tensor)
            for key, tensor in lease.tensors.items()
        }
        self.rows: dict[Key, Array] = {key: as_array(t) for key, t in self._tensors.items()}
        lead = (layout.steps, math.prod(layout.batch))
        self.lanes: dict[Key, Array] = {
            key: rows.reshape(*lead, *layout.leaves[key].shape) for key, rows in self.rows.items()
        }

    def inputs(self, key: Key, start: int, stop: int) -> tuple[tuple[Tensor, ...], bool]:
        """The rows of an entry as tensors, and whether each is contiguous."""
        tensor = self._tensors[key]
        apart = bool(self.lease.layout.batch) and key not in self._staged
        return tensor[start:stop].unbind(0), not apart

    def clear_from(self, row: int, but: Key) -> None:
        """Zeroes the rows that were not filled, of all entries but one."""
        for key, rows in self.rows.items():
            if key != but:
                rows[row:] = 0

    def deliver(self, hidden: set[Key], device: torch.device | None) -> TensorDictBase:
        """The batch as a TensorDict.

        Args:
            hidden: keys to leave out.
            device: what the TensorDict says as its device (its tensors are moved there).
        """
        self.settle()
        return as_batch(self.lease, hidden, device)

    def settle(self) -> None:
        """Puts in its place what was gathered elsewhere."""
        axis = len(self.lease.layout.batch)
        for key, staged in self._staged.items():
            self.lease.tensors[key].copy_(staged.movedim(0, axis))


def as_batch(lease: Lease, hidden: Iterable[Key], device: torch.device | None) -> TensorDict:
    """What a block holds, as a TensorDict.

    Args:
        lease: the block.
        hidden: keys to leave out.
        device: what the TensorDict says as its device (its tensors are moved there).
    """
    shown = {key: tensor for key, tensor in lease.tensors.items() if key not in hidden}
    layout = lease.layout
    names = [*[None] * len(layout.batch), "time"]
    batch = tensordict_of(shown, (*layout.batch, layout.steps), names)
    return batch if device is None else batch.to(device)


def put(batch: TensorDictBase, lease: Lease) -> bool:
    """Copies a batch to leased memory, if it has the layout of that; tells whether it has."""
    if layout_of(batch) != lease.layout:
        return False
    for key, tensor in lease.tensors.items():
        tensor.copy_(batch.get(key))
    return True


def staged_keys(layout: Layout) -> list[Key]:
    """The entries that are gathered elsewhere before they are put in their places."""
    if not layout.batch:
        return []
    return [
        key
        for key, leaf in layout.leaves.items()
        if math.prod(leaf.shape) * leaf.dtype.itemsize <= _STAGED_BYTES
    ]


def as_array(tensor: Tensor) -> Array:
    """A tensor's memory as a numpy array (bfloat16 as its bytes in int16)."""
    array: Array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def _time_first(layout: Layout, key: Key) -> tuple[int, ...]:
    return (layout.steps, *layout.batch, *layout.leaves[key].shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Array:
    """An array of zeros, of the dtype in which tensors of ``dtype`` are written."""
    return np.zeros(shape, as_array(torch.empty(0, dtype=dtype)).dtype)
