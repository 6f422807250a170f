"""Memory for batches of environments whose data are tensors, on the environments' device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from trawl.keys import Key
from trawl.rollout.layout import Layout, Leaf
from trawl.rollout.slab import SlabPool
from trawl.tensordicts import tensordict_of


class TensorBlock:
    """Memory of one batch. Time is the first dimension, then the environment.

    Args:
        tensors: the entries, ``(steps, num_envs, *leaf)``, by key.

    Attributes:
        tensors: the entries.
    """

    def __init__(self, tensors: Mapping[Key, Tensor]) -> None:
        self.tensors = tensors
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
        result = tensordict_of(shown, batch, [None, "time"])
        # The tensors are there already, so this only sets the device of the TensorDict.
        return result if device is None else result.to(device)


class TensorPool:
    """Pool of blocks on one device.

    On the CPU, a :class:`~trawl.rollout.slab.SlabPool` leases them. On a GPU, the caching allocator
    of PyTorch is the pool: a batch's memory is free once nothing refers to it, and the allocator
    gives it out again only in the order of the stream that allocated it. It waits for other streams
    that a tensor was recorded on with ``record_stream``.

    Args:
        leaves: entries of a frame, by key.
        num_envs: number of environments.
        steps: number of steps in a batch.
        device: device of the blocks.
        recycle: True to reuse blocks on the CPU.
    """

    def __init__(
        self,
        leaves: Mapping[Key, Leaf],
        num_envs: int,
        steps: int,
        device: torch.device,
        recycle: bool,
    ) -> None:
        rows = {key: Leaf((num_envs, *leaf.shape), leaf.dtype) for key, leaf in leaves.items()}
        self._layout = Layout(rows, (), steps)
        self._device = device
        self._slabs = SlabPool(self._layout, recycle) if device.type == "cpu" else None

    def lease(self) -> TensorBlock:
        """Returns memory for a batch."""
        if self._slabs is not None:
            return TensorBlock(self._slabs.lease().tensors)
        return TensorBlock(
            {
                key: torch.empty(self._layout.shape(key), dtype=leaf.dtype, device=self._device)
                for key, leaf in self._layout.leaves.items()
            }
        )

    def describe(self) -> dict[str, int]:
        """Returns the number of batches in use and the size of all blocks, where they are known."""
        if self._slabs is None:
            return {}
        return {"batches_held": self._slabs.leased, "memory_bytes": self._slabs.nbytes}
