"""Memory of a batch that is being filled, and its delivery as a TensorDict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from trawl.keys import Key, next_of
from trawl.memory import Array
from trawl.rollout.layout import Layout, layout_of, pool_key
from trawl.rollout.slab import Lease
from trawl.rollout.windows import WindowArrays, Windows
from trawl.stacked_frames import StackedFrames
from trawl.tensordicts import size_groups, tensordict_of

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
        tensors: the entries with time first, ``(steps, *batch, *leaf)``, by key.
        rows: the same memory as arrays.
        flat_rows: the same arrays with a single batch dimension, ``(steps, num_envs, *leaf)``.
        windows: stacks that a policy reads instead of the entries of the batch, by key.
        grown: frames of stacked observations for which the leased memory has no room, by key.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.windows: Mapping[Key, Windows] = {}
        self.grown: dict[Key, Tensor] = {}
        layout = lease.layout
        axis = len(layout.batch)
        self._staged = {
            key: torch.empty(_time_first(layout, key), dtype=layout.leaves[key].dtype)
            for key in staged_keys(layout)
        }
        self.tensors: dict[Key, Tensor] = {
            key: self._staged.get(key, lease.tensors[key].movedim(axis, 0)) for key in layout.leaves
        }
        self.rows: dict[Key, Array] = {key: as_array(t) for key, t in self.tensors.items()}
        lead = (layout.steps, math.prod(layout.batch))
        self.flat_rows: dict[Key, Array] = {
            key: rows.reshape(*lead, *layout.leaves[key].shape) for key, rows in self.rows.items()
        }

    def inputs(self, key: Key, start: int, stop: int) -> tuple[Sequence[Tensor], bool]:
        """Returns the rows of an entry as tensors, and True if each of them is contiguous."""
        return self._inputs(key, start, stop, slice(None))

    def _inputs(
        self, key: Key, start: int, stop: int, envs: slice
    ) -> tuple[Sequence[Tensor], bool]:
        if key in self.windows:
            return self.windows[key].tensors(start, stop, envs)
        tensor = self.tensors[key][start:stop]
        batch = bool(self.lease.layout.batch)
        apart = batch and key not in self._staged
        return (tensor[:, envs] if batch else tensor).unbind(0), not apart

    def readable(self, key: Key, start: int, stop: int) -> Array | WindowArrays:
        """Returns the rows of an entry as the policy reads it."""
        if key in self.windows:
            return self.windows[key].arrays(start, stop, slice(None))
        return self.rows[key][start:stop]

    def tensor(self, key: Key, steps: int) -> Tensor | None:
        """Returns the first rows of an entry, ``(steps, *batch, *leaf)``; None if there is none."""
        found = self.tensors.get(key)
        return None if found is None else found[:steps]

    def part(self, first: int, stop: int) -> BlockPart:
        """Returns the rows of some environments: a range along the first batch dimension."""
        chosen = slice(first, stop)
        rows = {key: rows[:, chosen] for key, rows in self.rows.items()}
        return BlockPart(
            rows,
            lambda key, a, b: self._inputs(key, a, b, chosen),
            lambda key, a, b: (
                self.windows[key].arrays(a, b, chosen) if key in self.windows else rows[key][a:b]
            ),
        )

    def clear_from(self, row: int, but: Key) -> None:
        """Zeroes the rows from ``row`` on, in all entries but one and the positions of frames."""
        pools = self.lease.layout.pools
        for key, rows in self.rows.items():
            if key != but and key not in pools and key[1:] not in pools:
                rows[row:] = 0

    def clear(self) -> None:
        """Zeroes the whole block."""
        for tensor in (*self.lease.tensors.values(), *self._staged.values()):
            tensor.zero_()

    def deliver(self, hidden: set[Key], device: torch.device | None) -> TensorDictBase:
        """Returns the batch as a TensorDict.

        Args:
            hidden: keys to leave out.
            device: device to which the TensorDict is moved; None leaves it without a device.
        """
        self.flush()
        tensors = self.lease.tensors
        grown = {pool_key(key): frames for key, frames in self.grown.items()}
        return as_batch(Lease(self.lease.layout, {**tensors, **grown}), hidden, device)

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
        readable: function with the results of :meth:`Block.readable`.
    """

    rows: dict[Key, Array]
    inputs: Callable[[Key, int, int], tuple[Sequence[Tensor], bool]]
    readable: Callable[[Key, int, int], Array | WindowArrays]


def as_batch(lease: Lease, hidden: Iterable[Key], device: torch.device | None) -> TensorDict:
    """Returns the contents of leased memory as a TensorDict.

    Args:
        lease: the memory.
        hidden: keys to leave out.
        device: device to which the TensorDict is moved; None leaves it without a device.
    """
    layout = lease.layout
    shown = {key: lease.tensors[key] for key in layout.leaves if key not in hidden}
    for key in layout.pools:
        frames = lease.tensors[pool_key(key)]
        for name in (key, next_of(key)):
            if name in shown:
                shown[name] = StackedFrames(frames, shown[name])
    names = [*[None] * len(layout.batch), "time"]
    batch = tensordict_of(shown, (*layout.batch, layout.steps), names)
    size_groups(batch, layout.agents)
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
