"""Memory into which a worker writes its batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trawl.backends.base import Port
from trawl.collectors.requests import CollectRequest
from trawl.rollout.block import Block
from trawl.rollout.layout import BatchPartition, Layout
from trawl.rollout.slab import Lease, byte_ranges, tensors_in, tensors_over

# Maximum number of blocks that a worker keeps open: a user who holds many batches may need
# thousands.
_MOST_BLOCKS = 256


class WorkerMemory:
    """Memory for the batches of a worker: shared with the driver, or the worker's own.

    Args:
        port: connection to the driver.

    Attributes:
        layout: layout of the worker's batches; None if it is not fixed.
    """

    def __init__(self, port: Port) -> None:
        self._port = port
        self.layout: Layout | None = None
        self._partitions: dict[int, BatchPartition] = {}
        self._blocks: dict[int, Block] = {}
        self._own: tuple[Block, NDArray[np.uint8]] | None = None

    @property
    def own_bytes(self) -> Any:
        """Bytes of the worker's own block; None if it has none."""
        return None if self._own is None else self._own[1]

    def add(self, name: int, partition: BatchPartition) -> None:
        """Records a partition, to which requests refer by its name."""
        self._partitions[name] = partition

    def remove(self, name: int) -> None:
        """Forgets a partition or a block to which no later request refers."""
        self._partitions.pop(name, None)
        self._blocks.pop(name, None)

    def block(self, request: CollectRequest) -> Block | None:
        """Returns the memory for a request's batch; None if batches have no fixed layout.

        Memory that a request names is kept open for later requests, up to ``_MOST_BLOCKS`` blocks.
        """
        if request.memory is None:
            return self._own_block()
        block = self._blocks.pop(request.memory, None)
        if block is None:
            partition = self._partitions[request.partition]
            memory = self._port.memory(request.memory)
            tensors, _ = tensors_over(partition.whole, memory)
            part, index = partition.part(request.part, tensors), request.part
            for start, stop in byte_ranges(partition.written(index, tensors).values(), memory):
                self._port.populate(request.memory, start, stop)
            starts = partition.pool_starts(index)
            layout = partition.layouts[index]
            block = Block(layout, Lease(layout, part, pool_starts=starts))
        self._blocks[request.memory] = block  # the most recently used comes last
        if len(self._blocks) > _MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return block

    def _own_block(self) -> Block | None:
        """Returns memory for batches that are sent; None if batches have no fixed layout.

        One block is enough, because each batch is sent before the next one begins.
        """
        if self.layout is None:
            return None
        if self._own is None:
            array = np.zeros(self.layout.nbytes, dtype=np.uint8)
            lease = Lease(self.layout, tensors_in(self.layout, array))
            self._own = Block(self.layout, lease), array
        return self._own[0]
