"""Copies between arrays and a device, one for each direction, through pinned memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from trawl.keys import Key
from trawl.memory import Array
from trawl.rollout.layout import Layout, Leaf
from trawl.stacked_frames import StackedFrames


class HostBlock:
    """Memory of the host that is copied to or from a device; pinned, if the device is a GPU.

    Args:
        nbytes: size of the block.
        device: the device.

    Attributes:
        memory: the bytes.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._device = device
        self._copied = new_event(device)

    def note_copy(self) -> None:
        """Notes that a copy from or to the block has begun on the device's current stream."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Waits until the last copy that was noted is done, if there is one."""
        if self._copied is not None:
            self._copied.synchronize()


def new_event(device: torch.device) -> torch.cuda.Event | None:
    """Returns an event that tells when a copy is done; None if copies are done when they return."""
    return torch.cuda.Event() if device.type == "cuda" else None


class DeviceTransfer:
    """Sends rows of arrays to a device, and receives tensors from it.

    All entries are packed into one block, so that each direction is a single copy. On the host,
    the blocks are pinned, and are filled again once they have been copied.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By the number of rows: the block to send, its layout, and the entries in it.
        self._outgoing: dict[int, tuple[HostBlock, Layout, dict[Key, Array]]] = {}
        self._incoming = HostBlock(0, device)

    def send(
        self, leaves: Mapping[Key, Leaf], arrays: Mapping[Key, Array], rows: NDArray[Any]
    ) -> dict[Key, Tensor]:
        """Returns some rows of arrays as tensors on the device.

        Args:
            leaves: the entries, the same in each call.
            arrays: the array of each entry. An entry without an array is False everywhere.
            rows: numbers of the rows.
        """
        count = len(rows)
        if count not in self._outgoing:
            self._outgoing[count] = self._new_block(leaves, arrays, count)
        block, layout, entries = self._outgoing[count]
        # The copy of the rows before may still be under way.
        block.wait()
        for key, target in entries.items():
            arrays[key].take(rows, 0, target, "clip")
        # A fresh block on the device, so that the policy may keep what it reads.
        sent = block.memory.to(self._device, non_blocking=True, copy=True)
        block.note_copy()
        return {
            key: _entry(sent, layout.places[key][0], leaf.dtype, layout.shape(key))
            for key, leaf in layout.leaves.items()
        }

    def _new_block(
        self, leaves: Mapping[Key, Leaf], arrays: Mapping[Key, Array], count: int
    ) -> tuple[HostBlock, Layout, dict[Key, Array]]:
        layout = Layout(leaves, (), count)
        block = HostBlock(layout.nbytes, self._device)
        # The policy also sees the bytes of entries without an array.
        memory = block.memory.zero_().numpy()
        entries = {
            key: np.frombuffer(
                memory, arrays[key].dtype, arrays[key][:1].size * count, layout.places[key][0]
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
        if len(self._incoming.memory) < len(packed):
            self._incoming = HostBlock(len(packed), self._device)
        block = self._incoming
        block.memory[: len(packed)].copy_(packed, non_blocking=True)
        block.note_copy()
        block.wait()
        offset = 0
        for index, part in zip(here, parts, strict=True):
            value = found[index]
            found[index] = _entry(block.memory, offset, value.dtype, tuple(value.shape))
            offset += len(part)
        return found


def _entry(block: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Returns an entry of a block of bytes."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return block[offset : offset + nbytes].view(dtype).view(shape)


def transfer_to(device: torch.device | None) -> DeviceTransfer | None:
    """Returns an object that copies to and from a device; None for the CPU."""
    return None if device is None or device.type == "cpu" else DeviceTransfer(device)


def moved(batch: TensorDictBase, device: torch.device) -> TensorDictBase:
    """Returns a batch on another device.

    From a GPU to the host, all entries are copied to pinned memory before the function waits once.
    Stacked entries that share frames still share them afterwards.
    """
    source = batch.device
    if source is None or source.type != "cuda" or device.type != "cpu":
        return batch.to(device)

    frames: dict[int, Tensor] = {}

    def copy(value: Tensor) -> Tensor:
        if isinstance(value, StackedFrames):
            if id(value.frames) not in frames:
                frames[id(value.frames)] = copy(value.frames)
            return StackedFrames(frames[id(value.frames)], copy(value.positions))
        # Contiguous on the device first, because a copy of separate rows is slow.
        target = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return target.copy_(value.contiguous(), non_blocking=True)

    result: TensorDictBase = batch.apply(copy, device=device)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(source))
    copied.synchronize()
    return result
