"""Memory of a batch that is being filled, and its delivery as a TensorDict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from trawl.keys import Key
from trawl.memory import Array
from trawl.rollout.layout import Layout, layout_of
from trawl.rollout.slab import Lease
from trawl.tensordicts import tensordict_of

# A step of several environments writes one row for each of them, and in the delivered batch these
# rows lie far apart. Small entries are therefore written side by side in separate memory, and
# copied to their places at the end. The rows of large entries (images) fill cache lines anyway.
_STAGED_BYTES = 1024


class Block:
    """Memory of a batch while it is being filled.

    Args:
        lease: the memory that will be delivered.

    Attributes:
        lease: the memory that will be delivered.
        rows: arrays with time first, ``(steps, *batch, *leaf)``, by key.
        flat_rows: the same arrays with a single batch dimension, ``(steps, num_envs, *leaf)``.
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
        self.flat_rows: dict[Key, Array] = {
            key: rows.reshape(*lead, *layout.leaves[key].shape) for key, rows in self.rows.items()
        }

    def inputs(self, key: Key, start: int, stop: int) -> tuple[tuple[Tensor, ...], bool]:
        """Returns the rows of an entry as tensors, and True if each of them is contiguous."""
        tensor = self._tensors[key]
        apart = bool(self.lease.layout.batch) and key not in self._staged
        return tensor[start:stop].unbind(0), not apart

    def tensor(self, key: Key, steps: int) -> Tensor | None:
        """Returns the first rows of an entry, ``(steps, *batch, *leaf)``; None if there is none."""
        found = self._tensors.get(key)
        return None if found is None else found[:steps]

    def part(self, first: int, stop: int) -> BlockPart:
        """Returns the rows of some environments: a range along the first batch dimension."""
        chosen = slice(first, stop)
        return BlockPart(
            {key: rows[:, chosen] for key, rows in self.rows.items()},
            lambda key, a, b: (self._tensors[key][a:b, chosen].unbind(0), key in self._staged),
        )

    def clear_from(self, row: int, but: Key) -> None:
        """Zeroes the rows from ``row`` on, in all entries except ``but``."""
        for key, rows in self.rows.items():
            if key != but:
                rows[row:] = 0

    def deliver(self, hidden: set[Key], device: torch.device | None) -> TensorDictBase:
        """Returns the batch as a TensorDict.

        Args:
            hidden: keys to leave out.
            device: device to which the TensorDict is moved; None leaves it without a device.
        """
        self.flush()
        return as_batch(self.lease, hidden, device)

    def flush(self) -> None:
        """Copies entries from separate memory to their places in the leased memory."""
        axis = len(self.lease.layout.batch)
        for key, staged in self._staged.items():
            self.lease.tensors[key].copy_(staged.movedim(0, axis))


@dataclass(frozen=True)
class BlockPart:
    """Rows of some of a block's environments.

    Attributes:
        rows: arrays with time first, ``(steps, *batch, *leaf)``, by key.
        inputs: function with the results of :meth:`Block.inputs`.
    """

    rows: dict[Key, Array]
    inputs: Callable[[Key, int, int], tuple[tuple[Tensor, ...], bool]]


def as_batch(lease: Lease, hidden: Iterable[Key], device: torch.device | None) -> TensorDict:
    """Returns the contents of leased memory as a TensorDict.

    Args:
        lease: the memory.
        hidden: keys to leave out.
        device: device to which the TensorDict is moved; None leaves it without a device.
    """
    shown = {key: tensor for key, tensor in lease.tensors.items() if key not in hidden}
    layout = lease.layout
    names = [*[None] * len(layout.batch), "time"]
    batch = tensordict_of(shown, (*layout.batch, layout.steps), names)
    return batch if device is None else batch.to(device)


def copy_into(batch: TensorDictBase, lease: Lease) -> bool:
    """Copies a batch to leased memory; returns False if their layouts differ."""
    if layout_of(batch) != lease.layout:
        return False
    for key, tensor in lease.tensors.items():
        tensor.copy_(batch.get(key))
    return True


def staged_keys(layout: Layout) -> list[Key]:
    """Returns the keys of entries that are written to separate memory first."""
    if not layout.batch:
        return []
    return [
        key
        for key, leaf in layout.leaves.items()
        if math.prod(leaf.shape) * leaf.dtype.itemsize <= _STAGED_BYTES
    ]


def as_array(tensor: Tensor) -> Array:
    """Returns a numpy array over a tensor's memory (int16 for bfloat16)."""
    array: Array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def _time_first(layout: Layout, key: Key) -> tuple[int, ...]:
    return (layout.steps, *layout.batch, *layout.leaves[key].shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Array:
    """Returns an array of zeros, with the dtype that :func:`as_array` uses for ``dtype``."""
    return np.zeros(shape, as_array(torch.empty(0, dtype=dtype)).dtype)
