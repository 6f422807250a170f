"""Memory of a batch that is being filled, and its delivery as a TensorDict.

In a delivered batch, time is the last batch dimension, so the rows that one step writes lie far
apart. Batches of environments therefore write small entries to memory in which time comes first,
and copy them to their places at the end. Large entries, and all entries of single environments, are
written in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.keys import Key, next_of
from trawl.memory import Array
from trawl.rollout.episodes import split_rows
from trawl.rollout.inputs import InputMemory, InputRows, LazyRows
from trawl.rollout.layout import Layout, as_array, layout_of, pool_key
from trawl.rollout.slab import Lease, tensors_in
from trawl.stacked_frames import StackedFrames
from trawl.tensordicts import size_groups, tensordict_of

# A step of several environments writes one row for each of them, and in the delivered batch these
# rows usually lie far apart. Small entries are then written side by side in separate memory, and
# copied to their places at the end. The rows of large entries (images) fill cache lines anyway.
_STAGED_BYTES = 1024


#: Functions that act in rows, and the plans that they follow, by binder and rows.
Acts = dict[tuple[Any, int, int, bool], tuple[Any, Callable[[int], None], Sequence[Any]]]


class StackRows(Protocol):
    """Frames of an observation that a policy reads as stacks."""

    def stacks(self, start: int, stop: int, envs: slice, copied: bool) -> InputRows:
        """Returns the stacks of some rows.

        Args:
            start: the first row.
            stop: the row after the last one.
            envs: range of environments along the first batch dimension.
            copied: True for memory that nothing else refers to.
        """


class BatchMemory(Protocol):
    """Memory that is leased for batches of one layout.

    Attributes:
        layout: the layout.
    """

    layout: Layout

    def lease(self, content: NDArray[np.uint8] | None = None) -> Lease:
        """Leases memory that nothing else refers to.

        Args:
            content: bytes to copy there, in the order of the memory; None to leave it undefined.
        """

    def describe(self) -> dict[str, int]:
        """Returns the number of batches in use and the size of all memory, if they are known."""


class Block:
    """Memory of a batch while it is being filled.

    Args:
        layout: layout of the batch.
        lease: the memory that will be delivered; None if it is leased only when a batch is
            finished. In this case, all entries are written to separate memory first, so that the
            block can be filled again and again.

    Attributes:
        layout: layout of the batch.
        steps: functions that take the steps of a chunk of rows, and what they depend on, by the
            chunk. They can be used again when the block is filled again.
        acts: functions that act in rows, which can be used again, too.
        tensors: the entries with time first, ``(steps, *batch, *leaf)``, by key.
        windows: stacks that a policy reads instead of the entries of the batch, by key.
        grown: frames of stacked observations for which the leased memory has no room, by key.
    """

    def __init__(self, layout: Layout, lease: Lease | None = None) -> None:
        self.layout = layout
        self._lease = lease
        self.steps: dict[tuple[int, int], tuple[Any, Callable[[int], None]]] = {}
        self.acts: Acts = {}
        self.windows: Mapping[Key, StackRows] = {}
        self.grown: dict[Key, Tensor] = {}
        #: The batch as bytes in the order of leased memory; None if they have another order.
        self.content: NDArray[np.uint8] | None = None
        if lease is not None and lease.rows is not None:
            self._staged: dict[Key, Tensor] = {}
            self.tensors: dict[Key, Tensor] = dict(lease.rows)
            return
        axis = len(layout.batch)
        staged = layout.leaves if lease is None else _staged_keys(lease)
        if lease is None and not axis:
            self.content = np.zeros(layout.nbytes, np.uint8)
            self._staged = tensors_in(layout, self.content)
        else:
            self._staged = {
                key: torch.empty(_time_first(layout, key), dtype=layout.leaves[key].dtype)
                for key in staged
            }
        self.tensors = {
            key: self._staged[key]
            if lease is None or key in self._staged
            else lease.tensors[key].movedim(axis, 0)
            for key in layout.leaves
        }

    @cached_property
    def rows(self) -> dict[Key, Array]:
        """The entries as arrays, which have the same memory."""
        return {key: as_array(tensor) for key, tensor in self.tensors.items()}

    @cached_property
    def flat_rows(self) -> dict[Key, Array]:
        """The arrays with a single batch dimension, ``(steps, num_envs, *leaf)``."""
        lead = (self.layout.steps, math.prod(self.layout.batch))
        leaves = self.layout.leaves
        return {key: rows.reshape(*lead, *leaves[key].shape) for key, rows in self.rows.items()}

    @property
    def lease(self) -> Lease:
        """The memory that will be delivered, with which the block was made."""
        assert self._lease is not None
        return self._lease

    def flat(self, key: Key) -> Tensor:
        """Returns an entry with a single batch dimension, ``(steps, num_envs, *leaf)``."""
        lead = (self.layout.steps, math.prod(self.layout.batch))
        return self.tensors[key].view(*lead, *self.layout.leaves[key].shape)

    def clear_from(self, row: int, but: Key) -> None:
        """Zeroes the rows from ``row`` on, in all entries but one and the positions of frames."""
        pools = self.layout.pools
        for key, rows in self.tensors.items():
            if key != but and key not in pools and key[1:] not in pools:
                rows[row:] = 0

    def clear(self) -> None:
        """Zeroes the whole block."""
        leased = () if self._lease is None else self._lease.tensors.values()
        for tensor in (*leased, *self._staged.values()):
            tensor.zero_()

    def on_host(self, key: Key, stop: int) -> Array:
        """Returns rows of an entry as an array, ``(stop, num_envs, *leaf)``, on the host."""
        rows = self.tensors[key]
        if rows.device.type == "cpu":
            return self.flat_rows[key][:stop]
        return as_array(rows[:stop].flatten(1, len(self.layout.batch)).cpu())

    def deliver(
        self, hidden: frozenset[Key], device: torch.device | None, pool: BatchMemory | None = None
    ) -> TensorDictBase:
        """Returns the batch as a TensorDict.

        Args:
            hidden: keys to leave out.
            device: device to which the TensorDict is moved; None leaves it without a device.
            pool: pool that leases the memory to deliver, if the block was made without.
        """
        if self._lease is None:
            assert pool is not None
            lease = self.flush(pool.lease(self.content))
        else:
            lease = self.flush()
        if self.grown:
            grown = {pool_key(key): frames for key, frames in self.grown.items()}
            lease = Lease(lease.layout, {**lease.tensors, **grown})
        return as_batch(lease, hidden, device)

    def copy_to(self, lease: Lease) -> None:
        """Copies the batch to memory of the host, such as that which a worker shares."""
        for key in self.layout.leaves:
            lease.tensors[key].copy_(self.lease.tensors[key])
        for key in self.layout.pools:
            frames, start = self.lease.tensors[pool_key(key)], lease.pool_starts.get(key, 0)
            lease.tensors[pool_key(key)][start : start + len(frames)].copy_(frames)
            for name in (key, next_of(key)):
                lease.tensors[name].add_(start)

    def flush(self, lease: Lease | None = None) -> Lease:
        """Copies entries from separate memory to their places in the leased memory.

        Args:
            lease: the leased memory; by default that with which the block was made.

        Returns:
            The leased memory.
        """
        lease = lease or self.lease
        if self.content is not None:
            return lease
        axis = len(self.layout.batch)
        for key, staged in self._staged.items():
            lease.tensors[key].copy_(staged.movedim(0, axis))
        return lease


class PolicyRows(Protocol):
    """Rows of a batch that a policy reads and writes: those of all environments, or of some.

    Attributes:
        tensors: the entries with time first, by key.
        acts: functions to use again when the rows are filled again, by what they were bound to;
            None if rows are filled only once.
    """

    tensors: Mapping[Key, Tensor]
    acts: Acts | None

    def inputs(self, key: Key, start: int, stop: int, copied: bool) -> InputRows:
        """Returns the rows of a chunk as the policy reads them.

        Args:
            key: key of the entry.
            start: first row of the chunk.
            stop: row after the last one of the chunk.
            copied: True for memory that nothing else refers to, for a policy that may change or
                keep its inputs.
        """

    def rows(self, key: Key, start: int, stop: int) -> Sequence[Any]:
        """Returns the rows of a chunk, to write to, and the row after it if there is one."""


class BlockPart(PolicyRows):
    """Rows of a block that is filled by way of arrays.

    Args:
        block: the block.
        copies: memory of the policy's own.
        envs: range of the environments along the first batch dimension.
    """

    def __init__(self, block: Block, copies: InputMemory, envs: slice = slice(None)) -> None:
        self._block, self._copies, self._envs = block, copies, envs
        self.tensors = block.tensors
        self.acts = None if block.windows else block.acts

    @override
    def inputs(self, key: Key, start: int, stop: int, copied: bool) -> InputRows:
        block, windows = self._block, self._block.windows.get(key)
        if windows is not None:
            return windows.stacks(start, stop, self._envs, copied)
        if copied:
            rows = self._chosen(block.rows[key], start, stop)
            return self._copies.of(key, rows, block.tensors[key].dtype)
        chosen = self._chosen(block.tensors[key], start, stop)
        return contiguous(chosen.unbind(0))

    @override
    def rows(self, key: Key, start: int, stop: int) -> list[Array]:
        return split_rows(self._chosen(self._block.rows[key], start, stop + 1))

    def _chosen(self, entry: Any, start: int, stop: int) -> Any:
        rows = entry[start:stop]
        return rows if self._envs == slice(None) else rows[:, self._envs]


def as_batch(lease: Lease, hidden: frozenset[Key], device: torch.device | None) -> TensorDict:
    """Returns the contents of leased memory as a TensorDict.

    Args:
        lease: the memory.
        hidden: keys to leave out.
        device: device to which the TensorDict is moved; None leaves it without a device.
    """
    layout = lease.layout
    tensors: Mapping[Key, Any] = lease.tensors
    if layout.pools:
        tensors = dict(tensors)
        for key in layout.pools:
            for name in {key, next_of(key)} & layout.leaves.keys() - hidden:
                tensors[name] = StackedFrames(tensors[pool_key(key)], tensors[name])
    names = [*[None] * len(layout.batch), "time"]
    batch = tensordict_of(layout.tree(hidden), tensors, layout.size, names)
    size_groups(batch, layout.agents)
    return batch if device is None else batch.to(device)


def copy_into(batch: TensorDictBase, lease: Lease) -> bool:
    """Copies a batch to leased memory; returns False if their layouts differ."""
    if layout_of(batch) != lease.layout:
        return False
    for key, tensor in lease.tensors.items():
        tensor.copy_(batch.get(key))
    return True


def _staged_keys(lease: Lease) -> list[Key]:
    """Returns the keys of entries that are written to separate memory first."""
    layout = lease.layout
    axis = len(layout.batch)
    return [
        key
        for key, leaf in layout.leaves.items()
        if axis
        and math.prod(leaf.shape) * leaf.dtype.itemsize <= _STAGED_BYTES
        and not lease.tensors[key].movedim(axis, 0)[0].is_contiguous()
    ]


def contiguous(rows: Sequence[Tensor]) -> InputRows:
    """Returns rows, each of them contiguous when it is read."""
    if rows[0].is_contiguous():
        return rows
    return LazyRows(lambda t: rows[t].contiguous(), len(rows))


def _time_first(layout: Layout, key: Key) -> tuple[int, ...]:
    return (layout.steps, *layout.batch, *layout.leaves[key].shape)
