"""Entries of frames, and conversion of their values to numbers or strings."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, stack
from torch import Tensor

from trawl.keys import MASK, TRAJ_IDS, Key, as_key, nested, show_key, show_keys
from trawl.tensordicts import of_frames

# Names of dtypes in a record. Packed and quantized dtypes are left out: they are not plain numbers.
_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPES: dict[str, torch.dtype] = {n: getattr(torch, n) for n in _NAMES if hasattr(torch, n)}
_TEXT = "str"
# Limits for the values in a record. Beyond these, torch fails, or the recursion gets too deep.
_MOST_PARTS, _MOST_DIMS, _MOST_BYTES = 64, 32, 2**63


@dataclass(frozen=True)
class Entry:
    """Description of an entry that each frame has.

    Attributes:
        key: key of the entry.
        dtype: dtype of the entry; None for text.
        shape: shape of the entry in one frame.
    """

    key: Key
    dtype: torch.dtype | None
    shape: tuple[int, ...]

    @classmethod
    def of(cls, key: Key, value: Any) -> Entry:
        """Returns the description of an entry, given the entry's values in several frames.

        Raises:
            TypeError: if the values are neither text nor a tensor of a fixed shape and a supported
                dtype.
        """
        if isinstance(value, Tensor) and not value.is_nested:
            if value.dtype not in _DTYPES.values():
                raise TypeError(
                    f"a dataset can't hold {value.dtype}, the dtype of entry {show_key(key)}"
                )
            return cls(key, value.dtype, tuple(value.shape[1:]))
        if isinstance(value, (NonTensorData, NonTensorStack)) and _is_text(value):
            return cls(key, None, ())
        raise TypeError(
            f"a dataset can hold only text and tensors of fixed shape, but entry {show_key(key)} "
            f"is {'ragged' if isinstance(value, Tensor) else type(value).__name__}"
        )

    @classmethod
    def from_json(cls, facts: Any) -> Entry:
        """Returns the entry that an object from :meth:`to_json` describes.

        Raises:
            ValueError: if ``facts`` is not a description of an entry.
        """
        facts = facts if isinstance(facts, dict) else {}
        key, name, shape = facts.get("key"), facts.get("dtype"), facts.get("shape")
        if (
            not isinstance(key, list)
            or not 0 < len(key) <= _MOST_PARTS
            or not all(isinstance(part, str) for part in key)
        ):
            raise ValueError(f"an entry has the invalid key {reprlib.repr(key)}")
        if name != _TEXT and (not isinstance(name, str) or name not in _DTYPES):
            raise ValueError(f"an entry has the invalid dtype {reprlib.repr(name)}")
        if (
            not isinstance(shape, list)
            or len(shape) > (0 if name == _TEXT else _MOST_DIMS)
            or not all(is_count(size) for size in shape)
        ):
            raise ValueError(f"an entry has the invalid shape {reprlib.repr(shape)}")
        return cls(tuple(key), _DTYPES.get(name), tuple(shape))

    def to_json(self) -> dict[str, Any]:
        """Returns a description of the entry for a JSON file."""
        return {"key": list(self.key), "dtype": self.kind, "shape": list(self.shape)}

    @property
    def kind(self) -> str:
        """Name of the dtype; ``"str"`` for text."""
        return _TEXT if self.dtype is None else str(self.dtype).removeprefix("torch.")

    @property
    def size(self) -> int:
        """Number of values of the entry in one frame; 1 for text."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Number of bytes of the entry in one frame; 0 for text, which has no fixed size."""
        return 0 if self.dtype is None else self.size * self.dtype.itemsize

    @property
    def column(self) -> str:
        """Name of the entry's column in a table: the parts of its key, joined by dots."""
        return ".".join(self.key)


def is_count(value: object) -> TypeGuard[int]:
    """Returns True if a value from a JSON file is an integer from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < _MOST_BYTES


def entries_from_json(facts: Any, frames: int) -> list[Entry]:
    """Returns the entries that a dataset's record lists.

    Args:
        facts: the record's list of entries, not yet checked.
        frames: number of frames in the dataset.

    Raises:
        ValueError: if ``facts`` is not a list of entries that a dataset can have.
    """
    if not isinstance(facts, list):
        raise ValueError(f"entries must be a list, but it is {reprlib.repr(facts)}")
    entries = [Entry.from_json(each) for each in facts]
    keys = {entry.key for entry in entries}
    if len(keys) < len(entries):
        raise ValueError("two entries have the same key")
    for key in keys:
        if any(key[:length] in keys for length in range(1, len(key))):
            raise ValueError(f"entry {reprlib.repr(key)} is nested in another entry")
    for entry in entries:
        # A dimension of size 0 counts as 1, because torch multiplies the others anyway.
        numbers = math.prod(max(1, size) for size in entry.shape)
        if max(1, frames) * numbers * (entry.dtype or torch.int8).itemsize >= _MOST_BYTES:
            raise ValueError(
                f"{frames} frames of shape {list(entry.shape)} are too large for any disk"
            )
    if frames and not any(entry.size for entry in entries):
        raise ValueError(f"it records {frames} frames, but has no entry with data")
    return entries


def bytes_of(rows: TensorDictBase, entries: Sequence[Entry]) -> int:
    """Returns the size of frames in memory in bytes; a character of text counts as one byte."""
    size = len(rows) * sum(entry.row for entry in entries)
    texts = (text for e in entries if e.dtype is None for text in to_texts(rows.get(e.key)))
    return size + sum(map(len, texts))


def to_texts(value: Any) -> list[str]:
    """Returns the strings of a text entry, one for each frame."""
    texts: list[str] = value.tolist()
    return texts


def from_texts(texts: Sequence[str]) -> Any:
    """Converts strings, one for each frame, back to the values of a text entry."""
    return stack([NonTensorData(text) for text in texts])


def to_columns(rows: TensorDictBase, entries: Sequence[Entry]) -> list[Any]:
    """Returns the values of each entry, as a tensor or as a list of strings."""
    values = ((entry, rows.get(entry.key)) for entry in entries)
    return [to_texts(value) if entry.dtype is None else value.cpu() for entry, value in values]


def from_columns(columns: Sequence[Any], entries: Sequence[Entry]) -> TensorDictBase:
    """Returns the frames that :func:`to_columns` converted.

    Raises:
        ValueError: if the columns don't have the dtypes and shapes of the entries.
    """
    if len(columns) != len(entries) or not len(columns):
        raise ValueError(f"{len(columns)} columns can't have {len(entries)} entries")
    found: dict[Key, Any] = {}
    for entry, column in zip(entries, columns, strict=True):
        found[entry.key] = from_texts(column) if entry.dtype is None else column
        if Entry.of(entry.key, found[entry.key]) != entry:
            raise ValueError(f"entry {show_key(entry.key)} has another dtype or shape")
    return TensorDict(nested(found), [len(columns[0])])


def _is_text(value: NonTensorData | NonTensorStack) -> bool:
    texts = value.tolist()
    return isinstance(texts, list) and all(isinstance(text, str) for text in texts)


def entries_of(rows: TensorDictBase) -> list[Entry]:
    """Returns descriptions of the entries of frames.

    Raises:
        TypeError: if an entry is neither text nor a tensor of a fixed shape and a supported dtype.
    """
    return [Entry.of(as_key(key), value) for key, value in _leaves(rows)]


def check_alike(entries: Sequence[Entry], rows: TensorDictBase) -> None:
    """Checks that frames have the given entries.

    Raises:
        ValueError: if the frames have other entries.
        TypeError: if an entry is neither text nor a tensor of a fixed shape and a supported dtype.
    """
    found = {as_key(key): value for key, value in _leaves(rows)}
    expected = {entry.key for entry in entries}
    if set(found) != expected:
        raise ValueError(
            "all batches must have the same entries, but this one lacks "
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
    """Returns the keys and values of all entries, including entries that are not tensors."""
    return list(rows.items(True, True, is_leaf=_is_leaf))


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, (NonTensorData, NonTensorStack)) or not issubclass(kind, TensorDictBase)


def flat_frames(batch: TensorDictBase) -> TensorDictBase:
    """Returns the frames of a batch in one dimension, environment by environment.

    Args:
        batch: a batch of any shape. Rows where ``("collector", "mask")`` is False or the
            trajectory id is -1 hold no experience, and are left out. The mask is removed.

    Returns:
        A TensorDict of shape ``(frames,)``.
    """
    flat = batch.reshape(batch.batch_size.numel())
    mask, ids = of_frames(flat, MASK), of_frames(flat, TRAJ_IDS)
    keep = torch.ones(len(flat), dtype=torch.bool)
    if mask is not None:
        keep &= mask.cpu()
        flat = flat.exclude(MASK)
    if ids is not None:
        keep &= ids.cpu() >= 0
    return flat if keep.all() else flat[keep]


def rechunk(parts: Iterable[TensorDictBase], size: int) -> Iterator[TensorDictBase]:
    """Yields frames in batches of ``size``; the last batch may have fewer.

    Args:
        parts: the frames, in batches of any size.
        size: number of frames in a batch.
    """
    waiting: list[TensorDictBase] = []
    for rows in parts:
        waiting.append(rows)
        if sum(map(len, waiting)) < size:
            continue
        *whole, rest = (torch.cat(waiting) if len(waiting) > 1 else rows).split(size)
        if len(rest) == size:
            whole, rest = [*whole, rest], rest[:0]
        yield from whole
        waiting = [rest.clone()] if len(rest) else []
    if waiting:
        yield torch.cat(waiting)


def to_numbers(values: Tensor) -> NDArray[Any]:
    """Converts an entry's values to an array of shape ``(frames, numbers)``.

    The conversion is exact, to a dtype that most libraries support: a complex number becomes two
    real numbers, and bfloat16 and floats that are narrower than float16 become float32.
    """
    values = values.detach().cpu()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    elif values.is_floating_point() and not _is_known(values.dtype):
        values = values.float()
    array: NDArray[Any] = values.reshape(len(values), -1).numpy()
    return array


def from_numbers(entry: Entry, array: NDArray[Any]) -> Tensor:
    """Converts an array from :func:`to_numbers` back to the values of an entry.

    The result is a tensor of shape ``(frames, *shape)``, which has its own memory.
    """
    frames, dtype = len(array), entry.dtype
    assert dtype is not None
    if dtype.is_complex:
        values = torch.view_as_complex(torch.tensor(array).reshape(frames, *entry.shape, 2))
    else:
        values = torch.tensor(array).reshape(frames, *entry.shape)
    return values.to(dtype)


def _is_known(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.float32, torch.float64)
