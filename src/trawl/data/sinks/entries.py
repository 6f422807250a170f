"""The entries of frames: their keys, dtypes and shapes, and how they are arrays of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from trawl.keys import Key, as_key, show_key, show_keys

IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")


@dataclass(frozen=True)
class Entry:
    """An entry of each frame.

    Attributes:
        key: its key.
        dtype: its dtype.
        shape: its shape, of one frame.
    """

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, key: Key, value: Any) -> Entry:
        """The entry that a value of some frames is of.

        Raises:
            TypeError: if it is no tensor of a fixed shape.
        """
        if not isinstance(value, Tensor) or value.is_nested:
            raise TypeError(
                f"a dataset holds tensors of fixed shapes, but entry {show_key(key)} is "
                f"{'ragged' if isinstance(value, Tensor) else type(value).__name__}"
            )
        return cls(key, value.dtype, tuple(value.shape[1:]))

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Entry:
        """The inverse of :meth:`to_json`."""
        return cls(tuple(facts["key"]), getattr(torch, facts["dtype"]), tuple(facts["shape"]))

    def to_json(self) -> dict[str, Any]:
        """What a JSON file may hold."""
        name = str(self.dtype).removeprefix("torch.")
        return {"key": list(self.key), "dtype": name, "shape": list(self.shape)}

    @property
    def size(self) -> int:
        """Numbers in one frame."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def row(self) -> int:
        """Bytes of one frame."""
        return self.size * self.dtype.itemsize

    @property
    def column(self) -> str:
        """The key as the name of a column."""
        return ".".join(self.key)


def entries_of(rows: TensorDictBase) -> list[Entry]:
    """The entries of frames.

    Raises:
        TypeError: if one is no tensor of a fixed shape.
    """
    return [Entry.of(as_key(key), value) for key, value in _leaves(rows)]


def check_alike(entries: Sequence[Entry], rows: TensorDictBase) -> None:
    """Checks that frames have these entries.

    Raises:
        ValueError: if they don't.
        TypeError: if an entry is no tensor of a fixed shape.
    """
    found = {as_key(key): value for key, value in _leaves(rows)}
    expected = {entry.key for entry in entries}
    if set(found) != expected:
        raise ValueError(
            f"batches must have the same entries, but this one lacks "
            f"{show_keys(expected - set(found))} and adds {show_keys(set(found) - expected)}"
        )
    for entry in entries:
        new = Entry.of(entry.key, found[entry.key])
        if new != entry:
            raise ValueError(
                f"entry {show_key(entry.key)} was {entry.dtype} of shape {entry.shape}, "
                f"but in this batch it is {new.dtype} of shape {new.shape}"
            )


def _leaves(rows: TensorDictBase) -> list[tuple[Any, Any]]:
    """All entries, non-tensor ones too."""
    return list(rows.items(True, True, is_leaf=_is_leaf))


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, (NonTensorData, NonTensorStack)) or not issubclass(kind, TensorDictBase)


def flat_frames(batch: TensorDictBase) -> TensorDictBase:
    """The frames of a batch, one after the other, environment by environment.

    Args:
        batch: of any shape. Rows where ``("collector", "mask")`` is False or the trajectory id
            is -1 are no experience, and left out; the mask is too.

    Returns:
        A TensorDict of shape ``(frames,)``.
    """
    flat = batch.reshape(batch.batch_size.numel())
    mask, ids = flat.get(MASK, None), flat.get(IDS, None)
    keep = torch.ones(len(flat), dtype=torch.bool)
    if mask is not None:
        keep &= mask.cpu()
        flat = flat.exclude(MASK)
    if ids is not None:
        keep &= ids.cpu() >= 0
    return flat if keep.all() else flat[keep]


def to_numbers(values: Tensor) -> NDArray[Any]:
    """Frames of an entry as an array ``(frames, numbers)`` of a dtype that everyone knows.

    Nothing is lost: a complex number is two, and what is narrower than float16 or is bfloat16
    becomes float32.
    """
    values = values.detach().cpu()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    elif values.is_floating_point() and not _is_known(values.dtype):
        values = values.float()
    array: NDArray[Any] = values.reshape(len(values), -1).numpy()
    return array


def from_numbers(entry: Entry, array: NDArray[Any]) -> Tensor:
    """The inverse of :func:`to_numbers`: of shape ``(frames, *shape)``, and memory of its own."""
    frames = len(array)
    if entry.dtype.is_complex:
        values = torch.view_as_complex(torch.tensor(array).reshape(frames, *entry.shape, 2))
    else:
        values = torch.tensor(array).reshape(frames, *entry.shape)
    return values.to(entry.dtype)


def _is_known(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.float32, torch.float64)
