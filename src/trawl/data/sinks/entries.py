"""The entries of frames, and their values as arrays of numbers or as texts."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, stack
from torch import Tensor

from trawl.keys import Key, as_key, show_key, show_keys

IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")


# How a JSON file names the dtypes of entries. Packed and quantized ones are not tensors of numbers.
_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPES: dict[str, torch.dtype] = {n: getattr(torch, n) for n in _NAMES if hasattr(torch, n)}
_TEXT = "str"
# Limits on what a record may say: beyond them torch fails, or a stack of calls ends.
_MOST_PARTS, _MOST_DIMS, _MOST_BYTES = 64, 32, 2**63


@dataclass(frozen=True)
class Entry:
    """An entry of each frame.

    Attributes:
        key: its key.
        dtype: its dtype; None of a text.
        shape: its shape, of one frame.
    """

    key: Key
    dtype: torch.dtype | None
    shape: tuple[int, ...]

    @classmethod
    def of(cls, key: Key, value: Any) -> Entry:
        """The entry that a value of some frames is of.

        Raises:
            TypeError: if it is neither a tensor of a fixed shape nor text.
        """
        if isinstance(value, Tensor) and not value.is_nested:
            if value.dtype not in _DTYPES.values():
                raise TypeError(f"a dataset can't hold {value.dtype}, as entry {show_key(key)} is")
            return cls(key, value.dtype, tuple(value.shape[1:]))
        if isinstance(value, (NonTensorData, NonTensorStack)) and _is_text(value):
            return cls(key, None, ())
        raise TypeError(
            f"a dataset holds tensors of fixed shapes and text, but entry {show_key(key)} is "
            f"{'ragged' if isinstance(value, Tensor) else type(value).__name__}"
        )

    @classmethod
    def from_json(cls, facts: Any) -> Entry:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: if it is none.
        """
        facts = facts if isinstance(facts, dict) else {}
        key, name, shape = facts.get("key"), facts.get("dtype"), facts.get("shape")
        if (
            not isinstance(key, list)
            or not 0 < len(key) <= _MOST_PARTS
            or not all(isinstance(part, str) for part in key)
        ):
            raise ValueError(f"an entry has the key {reprlib.repr(key)}")
        if name != _TEXT and (not isinstance(name, str) or name not in _DTYPES):
            raise ValueError(f"an entry has the dtype {reprlib.repr(name)}")
        if (
            not isinstance(shape, list)
            or len(shape) > (0 if name == _TEXT else _MOST_DIMS)
            or not all(is_count(size) for size in shape)
        ):
            raise ValueError(f"an entry has the shape {reprlib.repr(shape)}")
        return cls(tuple(key), _DTYPES.get(name), tuple(shape))

    def to_json(self) -> dict[str, Any]:
        """What a JSON file may hold."""
        return {"key": list(self.key), "dtype": self.kind, "shape": list(self.shape)}

    @property
    def kind(self) -> str:
        """The name of the dtype, or ``"str"`` of a text."""
        return _TEXT if self.dtype is None else str(self.dtype).removeprefix("torch.")

    @property
    def size(self) -> int:
        """Numbers in one frame; a text is one."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Bytes of one frame; of a text, which has no fixed size, 0."""
        return 0 if self.dtype is None else self.size * self.dtype.itemsize

    @property
    def column(self) -> str:
        """The key as the name of a column."""
        return ".".join(self.key)


def is_count(value: object) -> TypeGuard[int]:
    """Returns whether a value out of a JSON file is a number of things."""
    return type(value) is int and 0 <= value < _MOST_BYTES


def entries_from_json(facts: Any, frames: int) -> list[Entry]:
    """The entries of a dataset, out of its record.

    Args:
        facts: what the record says.
        frames: number of frames there are.

    Raises:
        ValueError: if no dataset has these entries.
    """
    if not isinstance(facts, list):
        raise ValueError(f"entries must be a list, but it is {reprlib.repr(facts)}")
    entries = [Entry.from_json(each) for each in facts]
    keys = {entry.key for entry in entries}
    if len(keys) < len(entries):
        raise ValueError("two entries have the same key")
    for key in keys:
        if any(key[:length] in keys for length in range(1, len(key))):
            raise ValueError(f"entry {reprlib.repr(key)} lies within another entry")
    for entry in entries:
        # Empty dimensions too: torch multiplies the others.
        numbers = math.prod(max(1, size) for size in entry.shape)
        if max(1, frames) * numbers * (entry.dtype or torch.int8).itemsize >= _MOST_BYTES:
            raise ValueError(f"no disk holds {frames} frames of shape {list(entry.shape)}")
    if frames and not any(entry.size for entry in entries):
        raise ValueError(f"it says {frames} frames, but no entry that holds any")
    return entries


def bytes_of(rows: TensorDictBase, entries: Sequence[Entry]) -> int:
    """Bytes of frames, in memory."""
    size = len(rows) * sum(entry.row for entry in entries)
    texts = (text for e in entries if e.dtype is None for text in to_texts(rows.get(e.key)))
    return size + sum(map(len, texts))


def to_texts(value: Any) -> list[str]:
    """The texts of an entry, one for each frame."""
    texts: list[str] = value.tolist()
    return texts


def from_texts(texts: Sequence[str]) -> Any:
    """The inverse of :func:`to_texts`."""
    return stack([NonTensorData(text) for text in texts])


def _is_text(value: NonTensorData | NonTensorStack) -> bool:
    texts = value.tolist()
    return isinstance(texts, list) and all(isinstance(text, str) for text in texts)


def entries_of(rows: TensorDictBase) -> list[Entry]:
    """The entries of frames.

    Raises:
        TypeError: if one is neither a tensor of a fixed shape nor text.
    """
    return [Entry.of(as_key(key), value) for key, value in _leaves(rows)]


def check_alike(entries: Sequence[Entry], rows: TensorDictBase) -> None:
    """Checks that frames have these entries.

    Raises:
        ValueError: if they don't.
        TypeError: if an entry is neither a tensor of a fixed shape nor text.
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
                f"entry {show_key(entry.key)} was {_shown(entry)}, but in this batch it is "
                f"{_shown(new)}"
            )


def _shown(entry: Entry) -> str:
    return "text" if entry.dtype is None else f"{entry.dtype} of shape {entry.shape}"


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
    frames, dtype = len(array), entry.dtype
    assert dtype is not None
    if dtype.is_complex:
        values = torch.view_as_complex(torch.tensor(array).reshape(frames, *entry.shape, 2))
    else:
        values = torch.tensor(array).reshape(frames, *entry.shape)
    return values.to(dtype)


def _is_known(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.float32, torch.float64)
