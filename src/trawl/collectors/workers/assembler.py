"""Combines the batches of several workers into a single batch.

A batch of all workers is one block of shared memory, of which each worker fills its own slice. The
strides of the slices produce the arrangement that ``cat_results`` asks for, so nothing is copied.
The memory has no name: its descriptor is sent over the worker's socket.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from trawl.backends.base import Backend
from trawl.collectors.driver.policy_version import stamp
from trawl.collectors.multi_config import MultiConfig
from trawl.collectors.workers.requests import BatchReady, WorkerReady
from trawl.keys import MASK, NO_TRAJECTORY, TRAJ_IDS, Key, show_key
from trawl.memory import Memory
from trawl.rollout.block import as_batch
from trawl.rollout.layout import BatchPartition, Layout, along_time
from trawl.rollout.slab import Lease, SlabPool, tensors_in
from trawl.tensordicts import zeros

# Number of spare blocks that are kept for a user who repeatedly holds several batches and releases
# them together. New shared memory is mapped, and its pages are cleared, in each worker.
_KEEP_NEEDED = 8


@dataclass(frozen=True)
class BufferSlice:
    """Place in memory for a worker's batch.

    Attributes:
        lease: the memory; None if the worker sends the batch, or writes it into a replay buffer.
        partition: division of the memory among workers.
        part: index of the worker's part of the memory.
    """

    lease: Lease | None = None
    partition: BatchPartition | None = None
    part: int = 0

    @property
    def memory(self) -> Any:
        """The leased memory; None if there is no lease."""
        return None if self.lease is None else self.lease.memory

    def batch(self, hidden: frozenset[Key]) -> TensorDictBase:
        """Returns the batch that a worker wrote to this slice, without hidden entries."""
        if self.lease is None or self.partition is None:
            raise ValueError("there is no batch: the worker wrote it into a replay buffer")
        tensors = self.partition.part(self.part, self.lease.tensors)
        return as_batch(Lease(self.partition.layouts[self.part], tensors), hidden, None)


#: Slice without memory, for a worker that sends its batch or writes it into a replay buffer.
NO_SLICE = BufferSlice()


@dataclass(frozen=True)
class WorkerBatch:
    """A worker's batch, with its place in memory and the worker's answer to the request."""

    index: int
    slice: BufferSlice
    answer: BatchReady

    @property
    def sent(self) -> bool:
        """True if the worker sent the batch instead of writing it to its slice."""
        return self.answer.batch is not None or self.answer.block is not None

    def batch(self, ready: WorkerReady) -> TensorDictBase:
        """Returns the batch; ``ready`` is the first message of the worker that made it."""
        answer = self.answer
        if answer.block is not None and ready.layout is not None:
            block = Lease(ready.layout, tensors_in(ready.layout, answer.block))
            return as_batch(block, ready.hidden, None)
        if answer.batch is not None:
            sent: TensorDictBase = pickle.loads(answer.batch, buffers=answer.buffers)
            return sent.clear_device_()
        return self.slice.batch(ready.hidden)


def limited(
    parts: Iterable[WorkerBatch], most: float, steps: Sequence[int] | None = None
) -> list[WorkerBatch]:
    """Returns the parts of a batch, counted so that they have at most ``most`` frames together.

    Args:
        parts: the parts.
        most: the number of frames.
        steps: for each worker, the number of frames in a step that is not to be divided, although
            there may be more frames then; None to divide steps.
    """
    found = []
    for part in parts:
        frames, kept = part.answer.frames, most
        if steps is not None and most < math.inf:
            kept = math.ceil(most / steps[part.index]) * steps[part.index]
        if frames > kept:
            part = replace(part, answer=replace(part.answer, frames=int(kept)))
        most -= min(frames, most)
        found.append(part)
    return found


class BatchAssembler:
    """Assigns places in memory to the workers' batches, and combines the batches.

    Args:
        ready: first message of each worker.
        how: way in which batches are combined (``cat_results``): ``"stack"``, 0 or -1.
        allocate: function that allocates memory of a given size in bytes, to which workers can
            write; None if the backend shares no memory.
        whole: True if the batch of all workers is one block of memory; False if each worker's
            batch has its own block.
        recycle: True to reuse the memory of batches that nothing refers to any more.
        after: True to write policy versions under ``"next"`` too.
        masked: True if batches may be incomplete. All batches then have a mask, unless they are
            joined along time.
    """

    def __init__(
        self,
        ready: Sequence[WorkerReady],
        how: str | int,
        allocate: Callable[[int], Memory] | None,
        whole: bool,
        recycle: bool = True,
        after: bool = True,
        masked: bool = False,
    ) -> None:
        self._after = after
        self._masked = masked
        self.how = how
        self.hidden = ready[0].hidden
        self._ready = list(ready)
        # Division of a block among all workers, if the workers can share a block.
        self._partition: BatchPartition | None = None
        # For each worker, a pool of blocks, and their partition. A block holds one batch of the
        # worker, so the partition has a single part.
        self._own: list[tuple[SlabPool, BatchPartition] | None] = [None] * len(ready)
        layouts = [one.layout for one in ready]
        first = layouts[0]
        alike = first is not None and all(
            layout is not None and layout.leaves == first.leaves and layout.batch == first.batch
            for layout in layouts
        )
        if not alike and how != "stack" and None not in layouts:
            raise ValueError(
                f"cat_results={how!r} needs workers whose batches have the same layout, but the "
                f"layouts differ: batch sizes {[one.batch_size for one in ready]}, "
                f"{_differing(layouts)}"
            )
        if alike and first is not None:
            self._partition = BatchPartition(first, [one.steps for one in ready], how)
        self._whole: SlabPool | None = None
        # Memory in which the driver combines batches that workers sent.
        self._gathered: SlabPool | None = None
        if whole and self._partition is not None:
            if allocate is None:
                self._gathered = SlabPool(self._partition.whole, recycle)
            else:
                self._whole = SlabPool(
                    self._partition.whole, recycle, allocate, keep_needed=_KEEP_NEEDED
                )
        elif allocate is not None:
            self._own = _pools_of(layouts, recycle, allocate)

    @classmethod
    def of(
        cls, config: MultiConfig, sync: bool, ready: Sequence[WorkerReady], backend: Backend
    ) -> BatchAssembler:
        """Makes the assembler for a collector, from the first messages of its workers."""
        whole = sync and not config.preempts
        return cls(
            ready,
            "stack" if config.cat_results is None else config.cat_results,
            backend.allocate if backend.shares_memory else None,
            whole=whole,
            recycle=config.use_buffers is not False,
            after=not config.compact_obs,
            masked=not whole and sync,
        )

    @property
    def pools(self) -> list[SlabPool]:
        """All memory pools, without duplicates."""
        own = (found[0] for found in self._own if found is not None)
        pools = (self._whole, self._gathered, *own)
        return list({id(pool): pool for pool in pools if pool is not None}.values())

    def slices(self) -> list[BufferSlice]:
        """Returns a buffer slice for each worker, for one batch of all workers."""
        if self._whole is not None:
            lease = self._whole.lease()
            return [BufferSlice(lease, self._partition, i) for i in range(len(self._ready))]
        return [self.slice(index) for index in range(len(self._ready))]

    def slice(self, index: int) -> BufferSlice:
        """Returns a buffer slice for a batch of one worker."""
        own = self._own[index]
        return NO_SLICE if own is None else BufferSlice(own[0].lease(), own[1])

    def batch_of(self, part: WorkerBatch) -> TensorDictBase:
        """Returns the batch of one worker, with its policy version if versions are tracked."""
        ready = self._ready[part.index]
        batch = part.batch(ready)
        return batch if ready.versioned else self._stamped(batch, part.answer.version)

    def combine(
        self, batches: Sequence[TensorDictBase], version: int | str | None
    ) -> TensorDictBase:
        """Combines batches that are outside this assembler's memory, one from each worker."""
        joined = self._joined(dict(enumerate(batches)))
        return joined if self._ready[0].versioned else self._stamped(joined, version)

    def assemble(self, parts: Sequence[WorkerBatch]) -> TensorDictBase:
        """Combines batches that are sorted by worker; batches of some workers may be missing."""
        full = len(parts) == len(self._ready) and all(
            part.answer.filled == self._ready[part.index].steps for part in parts
        )
        lease = parts[0].slice.lease
        if full and self._whole is not None and lease and not any(p.sent for p in parts):
            batch: TensorDictBase = as_batch(lease, self.hidden, None)
            return self._stamped_all(batch, parts)
        sent = all(part.answer.block is not None for part in parts)
        if full and sent and self._gathered is not None and self._partition is not None:
            return self._stamped_all(self._copied(self._partition, self._gathered, parts), parts)
        even = len(parts) == len(self._ready) and len({part.answer.filled for part in parts}) == 1
        if (full or even) and not self._masked:
            return self._joined(
                {part.index: self.batch_of(part)[..., : part.answer.filled] for part in parts}
            )
        return self._incomplete(parts)

    def _copied(
        self, partition: BatchPartition, pool: SlabPool, parts: Sequence[WorkerBatch]
    ) -> TensorDictBase:
        """Copies workers' blocks into a single block, which is faster than joining TensorDicts."""
        lease = pool.lease()
        for part in parts:
            # The order of entries may differ between workers.
            layout = self._ready[part.index].layout
            assert layout is not None, "a worker without a layout sends no block"
            sent = tensors_in(layout, part.answer.block)
            partition.copy_part(part.index, lease.tensors, sent)
        return as_batch(lease, self.hidden, None)

    def _stamped_all(self, batch: TensorDictBase, parts: Sequence[WorkerBatch]) -> TensorDictBase:
        if self._ready[0].versioned:
            return batch
        versions = [part.answer.version for part in parts]
        if len(set(versions)) == 1 or self._partition is None:
            return self._stamped(batch, versions[0])
        if not all(isinstance(version, int) for version in versions):
            return self._joined({part.index: self.batch_of(part) for part in parts})
        numbers = torch.empty(batch.shape, dtype=torch.int64)
        for part in parts:
            self._partition.part(part.index, {(): numbers})[()].fill_(int(part.answer.version or 0))
        batch.set("policy_version", numbers)
        if self._after:
            batch.get("next").set("policy_version", numbers.clone())
        return batch

    def _stamped(self, batch: TensorDictBase, version: int | str | None) -> TensorDictBase:
        if version is not None:
            stamp(batch, version, self._after)
        return batch

    def _joined(self, batches: Mapping[int, TensorDictBase]) -> TensorDictBase:
        parts = list(batches.values())
        if self.how == "stack":
            stacked: TensorDictBase = TensorDict.maybe_dense_stack(parts, 0)
            return _named(stacked)
        batch = parts[0].shape[:-1]
        axis = len(batch) if along_time(self.how, batch) else 0
        return _named(torch.cat(parts, axis))

    def _incomplete(self, parts: Sequence[WorkerBatch]) -> TensorDictBase:
        """Combines batches, some of which may be incomplete.

        If the batches are joined along time, the result has only the steps that were taken.
        Otherwise, the result has its full shape, and a mask shows which rows are filled.
        """
        batches = {part.index: self.batch_of(part) for part in parts}
        steps = {part.index: part.answer.filled for part in parts}
        if along_time(self.how, self._ready[0].batch_size):
            filled = {
                index: batch[..., : steps[index]]
                for index, batch in batches.items()
                if steps[index]
            }
            return self._joined(filled)
        template = next(iter(batches.values()))
        whole = {}
        for index in range(len(self._ready)):
            batch = batches.get(index)
            if batch is None:
                batch = zeros(template)
                if (ids := batch.get(TRAJ_IDS, None)) is not None:
                    ids.fill_(NO_TRAJECTORY)
            mask = torch.zeros(batch.shape, dtype=torch.bool)
            mask[..., : steps.get(index, 0)] = True
            before = batch.get(MASK, None)
            whole[index] = batch.set(MASK, mask if before is None else mask & before)
        return self._joined(whole)


def _pools_of(
    layouts: Sequence[Layout | None], recycle: bool, allocate: Callable[[int], Memory]
) -> list[tuple[SlabPool, BatchPartition] | None]:
    """Returns a pool for each worker's batches; workers with the same layout share a pool."""
    # A worker has up to two requests at a time, and the user holds one batch.
    keep = 2 * len(layouts) + 1
    found = {
        layout: (
            SlabPool(layout, recycle, allocate, keep, keep + _KEEP_NEEDED),
            BatchPartition(layout, [layout.steps], -1),
        )
        for layout in layouts
        if layout is not None
    }
    return [None if layout is None else found[layout] for layout in layouts]


def _named(batch: TensorDictBase) -> TensorDictBase:
    batch.names = [*[None] * (batch.ndim - 1), "time"]
    return batch


def _differing(layouts: Sequence[Layout | None]) -> str:
    """Describes the entries in which layouts differ, for the end of an error message."""
    known = [layout.leaves for layout in layouts if layout is not None]
    keys = {key for leaves in known for key in leaves}
    found = [key for key in sorted(keys) if len({leaves.get(key) for leaves in known}) > 1]
    return (
        f"with different entries {', '.join(map(show_key, found))}"
        if found
        else "with the same entries"
    )
