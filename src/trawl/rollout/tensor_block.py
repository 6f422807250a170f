"""Memory for batches of environments whose data are tensors, on the environments' device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from trawl.keys import Key, next_of
from trawl.rollout.layout import Layout, Leaf, pool_key
from trawl.rollout.slab import SlabPool
from trawl.stacked_frames import StackedFrames
from trawl.tensordicts import tensordict_of

#: Writes entries of the next frame, given the row and the environments in which an episode begins.
Follow = Callable[[int, Tensor], None]
_NO_POOLS: Mapping[Key, Tensor] = MappingProxyType({})


class StackRows(Protocol):
    """Frames of one observation that the policy reads as stacks."""

    def stacks(self, start: int, stop: int, copied: bool) -> Sequence[Tensor]:
        """Returns the stacks of the steps of a chunk."""

    def follower(self, start: int, stop: int) -> Follow:
        """Returns a function to call after each step of a chunk, which begins stacks."""


class TensorBlock:
    """Memory of one batch. Time is the first dimension, then the environment.

    Args:
        tensors: the entries, ``(steps, num_envs, *leaf)``, by key.
        pools: frames of the stacked entries, by key.

    Attributes:
        tensors: the entries. While the batch is filled, those of stacked observations are the
            frames as the stepper writes them.
        pools: the frames.
        newest: function that replaces rows of an observation by the environment's own tensors,
            which a policy may read if it leaves its inputs alone; None if there are none.
        windows: frames that the policy reads as stacks, by key.
        begun: rows after which episodes begin, bool of shape ``(steps, num_envs)``; None if nothing
            is stacked.
        grown: True if pools have more frames than the leased memory.
    """

    newest: Callable[[Key, Sequence[Tensor]], Sequence[Tensor]] | None = None

    def __init__(
        self, tensors: Mapping[Key, Tensor], pools: Mapping[Key, Tensor] = _NO_POOLS
    ) -> None:
        self.tensors = dict(tensors)
        self.pools = dict(pools)
        self.windows: Mapping[Key, StackRows] = {}
        self.begun: Tensor | None = None
        self.grown = False
        self._chunk = (0, 0)
        self._rows: dict[Key, Sequence[Tensor]] = {}

    def rows(self, key: Key, start: int, stop: int) -> Sequence[Tensor]:
        """Returns the rows of a chunk, and the row after it if there is one."""
        if (start, stop) != self._chunk:
            self._chunk, self._rows = (start, stop), {}
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = self.tensors[key][start : stop + 1].unbind(0)
        return found

    def following(self, key: Key, start: int, stop: int, next_row: Tensor) -> list[Tensor]:
        """Returns the row of the next frame for each step of a chunk.

        Args:
            key: key of the entry.
            start: the chunk's first row.
            stop: the row after the chunk's last row.
            next_row: the row after the last row of the block.
        """
        found = self.rows(key, start, stop)[1:]
        return [*found] if len(found) == stop - start else [*found, next_row]

    def inputs(self, key: Key, start: int, stop: int, copied: bool) -> Sequence[Tensor]:
        """Returns the rows of a chunk as the policy reads them.

        Args:
            key: key of the entry.
            start: first row of the chunk.
            stop: row after the last one of the chunk.
            copied: True for memory that nothing else refers to, for a policy that may change or
                keep its inputs.
        """
        if key in self.windows:
            return self.windows[key].stacks(start, stop, copied)
        rows = self.rows(key, start, stop)
        if copied:
            return LazyRows(lambda t: rows[t].clone(), stop - start)
        return rows if self.newest is None else self.newest(key, rows)

    def followers(self, start: int, stop: int) -> list[Follow]:
        """Returns functions to call after each step of a chunk, when the next row is written."""
        if self.begun is None:
            return []
        begun = self.begun[start:stop].unbind(0)

        def note(t: int, starts: Tensor) -> None:
            begun[t].copy_(starts)

        return [note, *(one.follower(start, stop) for one in self.windows.values())]

    def clear(self) -> None:
        """Zeroes the whole block."""
        for tensor in (*self.tensors.values(), *self.pools.values()):
            tensor.zero_()

    def deliver(
        self, hidden: set[Key], batch: tuple[int, int], device: torch.device | None
    ) -> TensorDict:
        """Returns the batch as a TensorDict of size ``(num_envs, steps)``, without a copy.

        Args:
            hidden: keys to leave out.
            batch: batch size.
            device: device of the TensorDict.
        """
        shown = {k: value.transpose(0, 1) for k, value in self.tensors.items() if k not in hidden}
        for key, frames in self.pools.items():
            for name in (key, next_of(key)):
                if name in shown:
                    shown[name] = StackedFrames(frames, shown[name])
        result = tensordict_of(shown, batch, [None, "time"])
        # The tensors are there already, so this only sets the device of the TensorDict.
        return result if device is None else result.to(device)


class LazyRows(Sequence[Tensor]):
    """Tensors of the rows of a chunk, each made when it is read.

    Args:
        make: function of ``t`` that returns the tensor of the chunk's row ``t``.
        count: number of rows.
    """

    def __init__(self, make: Callable[[int], Tensor], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, t: Any) -> Any:
        return self._make(t)


class TensorPool:
    """Pool of blocks on one device.

    On the CPU, a :class:`~trawl.rollout.slab.SlabPool` leases them. On a GPU, the caching allocator
    of PyTorch is the pool: a batch's memory is free once nothing refers to it, and the allocator
    gives it out again only in the order of the stream that allocated it. It waits for other streams
    that a tensor was recorded on with ``record_stream``.

    Args:
        layout: layout of the batches, in which time is the last batch dimension.
        device: device of the blocks.
        recycle: True to reuse blocks on the CPU.
    """

    def __init__(self, layout: Layout, device: torch.device, recycle: bool) -> None:
        rows = {
            k: Leaf((*layout.batch, *leaf.shape), leaf.dtype) for k, leaf in layout.leaves.items()
        }
        # Time comes first. Each pool has the frames of all environments.
        self._layout = Layout(rows, (), layout.steps, layout.pools, (layout,))
        self._device = device
        self._slabs = SlabPool(self._layout, recycle) if device.type == "cpu" else None

    def lease(self) -> TensorBlock:
        """Returns memory for a batch."""
        layout = self._layout
        if self._slabs is not None:
            found = self._slabs.lease().tensors
            tensors = {key: found[key] for key in layout.leaves}
            return TensorBlock(tensors, {key: found[pool_key(key)] for key in layout.pools})
        tensors = {k: self._empty(layout.shape(k), leaf.dtype) for k, leaf in layout.leaves.items()}
        pools = {
            key: self._empty((layout.pool_rows[key], *pool.frame.shape), pool.frame.dtype)
            for key, pool in layout.pools.items()
        }
        return TensorBlock(tensors, pools)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def describe(self) -> dict[str, int]:
        """Returns the number of batches in use and the size of all blocks, where they are known."""
        if self._slabs is None:
            return {}
        return {"batches_held": self._slabs.leased, "memory_bytes": self._slabs.nbytes}
