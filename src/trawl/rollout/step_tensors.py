"""Tensors of a batch that is being filled, with time first, on the environments' device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trawl.keys import Key
from trawl.rollout.block import BatchMemory, Block, PolicyRows
from trawl.rollout.episodes import following
from trawl.rollout.inputs import InputRows, LazyRows
from trawl.rollout.layout import Layout, Leaf, pool_key
from trawl.rollout.slab import Lease, SlabPool


class StepTensors:
    """Tensors that a stepper writes, with time first: ``(steps, num_envs, *leaf)``.

    Args:
        arrays: the tensors, by key.
        next_obs: for each entry that a step passes on to the next step, the row after the last one.

    Attributes:
        first: index of the first environment.
    """

    first = 0

    def __init__(self, arrays: Mapping[Key, Tensor], next_obs: Mapping[Key, Tensor]) -> None:
        self.arrays, self.next_obs = dict(arrays), next_obs
        self._chunk = (0, 0)
        self._rows: dict[Key, Sequence[Tensor]] = {}

    def replaced(self, rows: Mapping[Key, Tensor]) -> StepTensors:
        """Returns the tensors, with other memory for some entries."""
        return StepTensors(self.arrays | dict(rows), self.next_obs)

    def rows(self, key: Key, start: int, stop: int) -> Sequence[Tensor]:
        """Returns the rows of a chunk, and the row after it if there is one."""
        if (start, stop) != self._chunk:
            self._chunk, self._rows = (start, stop), {}
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = self.arrays[key][start : stop + 1].unbind(0)
        return found

    def following(self, key: Key, start: int, stop: int) -> list[Tensor]:
        """Returns the row of the next frame for each step of a chunk."""
        return following(self.rows(key, start, stop)[1:], stop - start, self.next_obs[key])


class TensorRows(PolicyRows):
    """Rows of tensors that a policy reads and writes.

    Args:
        block: the block, which is filled only once.
        view: the tensors that the stepper writes.
        newest: function that replaces rows of an observation by the environment's own tensors,
            which a policy may read if it leaves its inputs alone.
    """

    acts = None

    def __init__(
        self,
        block: Block,
        view: StepTensors,
        newest: Callable[[Key, Sequence[Tensor]], Sequence[Tensor]],
    ) -> None:
        self._view, self._windows, self._newest = view, block.windows, newest
        self.tensors = view.arrays

    @override
    def inputs(self, key: Key, start: int, stop: int, copied: bool) -> InputRows:
        if key in self._windows:
            return self._windows[key].stacks(start, stop, slice(None), copied)
        rows = self.rows(key, start, stop)
        if copied:
            return LazyRows(lambda t: rows[t].clone(), stop - start)
        return self._newest(key, rows)

    @override
    def rows(self, key: Key, start: int, stop: int) -> Sequence[Tensor]:
        return self._view.rows(key, start, stop)


class TensorPool(BatchMemory):
    """Pool of blocks on one device, in which time is the first dimension.

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
        # Each pool of frames has those of all environments.
        self._own = Layout(rows, (), layout.steps, layout.pools, (layout,))
        self.layout = layout
        self._device = device
        self._slabs = SlabPool(self._own, recycle) if device.type == "cpu" else None

    @override
    def lease(self, content: Any = None) -> Lease:
        if self._slabs is not None:
            found = self._slabs.lease().tensors
        else:
            found = {
                key: torch.empty(shape, dtype=dtype, device=self._device)
                for key, (_, shape, dtype) in self._own.places.items()
            }
        axis, leaves = len(self.layout.batch), self.layout.leaves
        rows = {key: found[key] for key in leaves}
        tensors = {key: row.movedim(0, axis) for key, row in rows.items()}
        tensors |= {key: found[key] for key in map(pool_key, self.layout.pools)}
        return Lease(self.layout, tensors, rows=rows)

    @override
    def describe(self) -> dict[str, int]:
        return {} if self._slabs is None else self._slabs.describe()
