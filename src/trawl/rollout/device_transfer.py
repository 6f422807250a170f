"""Copies between arrays and a device, one for each direction, through pinned memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trawl.keys import Key
from trawl.memory import Array
from trawl.rollout.layout import Layout, Leaf


class DeviceTransfer:
    """Sends rows of arrays to a device, and receives tensors from it.

    All entries are packed into one block, so that each direction is a single copy. On the host,
    the blocks are pinned, and are used again for the next rows.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By the number of rows: the block to send, its layout, and the entries in it.
        self._outgoing: dict[int, tuple[Tensor, Layout, dict[Key, Array]]] = {}
        self._incoming = self._host_block(0)

    def _host_block(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def send(
        self, leaves: Mapping[Key, Leaf], arrays: Mapping[Key, Array], rows: NDArray[Any]
    ) -> dict[Key, Tensor]:
        """Returns some rows of arrays as tensors on the device.

        The rows of the last call must have been used up, which :meth:`receive` waits for.

        Args:
            leaves: the entries, the same in each call.
            arrays: the array of each entry. An entry without an array is False everywhere.
            rows: numbers of the rows.
        """
        count = len(rows)
        if count not in self._outgoing:
            self._outgoing[count] = self._new_block(leaves, arrays, count)
        block, layout, entries = self._outgoing[count]
        for key, target in entries.items():
            arrays[key].take(rows, 0, target, "clip")
        # A fresh block on the device, so that the policy may keep what it reads.
        sent = block.to(self._device, non_blocking=True, copy=True)
        return {
            key: _entry(sent, layout.offsets[key], leaf.dtype, layout.shape(key))
            for key, leaf in layout.leaves.items()
        }

    def _new_block(
        self, leaves: Mapping[Key, Leaf], arrays: Mapping[Key, Array], count: int
    ) -> tuple[Tensor, Layout, dict[Key, Array]]:
        layout = Layout(leaves, (), count)
        block = self._host_block(layout.nbytes).zero_()
        entries = {
            key: np.frombuffer(
                block.numpy(), arrays[key].dtype, arrays[key][:1].size * count, layout.offsets[key]
            ).reshape(layout.shape(key))
            for key in leaves
            if key in arrays
        }
        return block, layout, entries

    def receive(self, values: Sequence[Any]) -> list[Any]:
        """Returns tensors of the device on the CPU, valid until the next call.

        Values that aren't tensors on the device are returned as they are.
        """
        here = [
            index
            for index, value in enumerate(values)
            if type(value) is Tensor and value.device == self._device
        ]
        found = list(values)
        if not here:
            return found
        # With the widest dtypes first, each tensor's bytes are aligned to its dtype.
        here.sort(key=lambda index: -found[index].dtype.itemsize)
        parts = [found[index].detach().reshape(-1).view(torch.uint8) for index in here]
        packed = torch.cat(parts)
        if len(self._incoming) < len(packed):
            self._incoming = self._host_block(len(packed))
        self._incoming[: len(packed)].copy_(packed, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        offset = 0
        for index, part in zip(here, parts, strict=True):
            value = found[index]
            found[index] = _entry(self._incoming, offset, value.dtype, tuple(value.shape))
            offset += len(part)
        return found


def _entry(block: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Returns an entry of a block of bytes."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return block[offset : offset + nbytes].view(dtype).view(shape)


def transfer_to(device: torch.device | None) -> DeviceTransfer | None:
    """Returns an object that copies to and from a device; None for the CPU."""
    return None if device is None or device.type == "cpu" else DeviceTransfer(device)
