"""Messages to and from Ray actors: pickles, with large arrays and object references kept apart.

Ray transfers the arrays through its object store, where the receiver reads them without a copy.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

# Arrays of fewer bytes stay in the pickle.
_LEAST = 4096
_REFERENCES = ("ObjectRef", "ActorHandle")

Bytes = NDArray[np.uint8]


class Packed(NamedTuple):
    """Packed message.

    Attributes:
        data: the pickle.
        arrays: the memory of large arrays.
        refs: references to Ray objects, kept apart so that Ray sees them.
    """

    data: bytes
    arrays: list[Bytes]
    refs: list[Any]


class Letter(NamedTuple):
    """Header of the messages that a call brings to an actor.

    Attributes:
        heard: how many of the actor's messages the driver has; None if the letter does not tell.
        number: the number of the letter among those with messages, which may come in any order.
        interruption: the number of the last interruption before the messages, and how many
            interruptions there were so far.
    """

    heard: int | None
    number: int
    interruption: tuple[int, int]

    def packed(self, messages: Sequence[Packed]) -> tuple[bytes, list[Any]]:
        """Packs the letter with messages; returns it, and their arrays and references for Ray."""
        heads = [(data, len(arrays), len(refs)) for data, arrays, refs in messages]
        beside = [
            part for _, arrays, refs in messages for part in (*arrays, *([ref] for ref in refs))
        ]
        return pickle.dumps((self, heads), protocol=5), beside


def read_letter(letter: bytes, beside: Sequence[Any]) -> tuple[Letter, list[Packed]]:
    """Unpacks the result of :meth:`Letter.packed`: the letter, and its messages."""
    own, heads = pickle.loads(letter)
    parts = iter(beside)
    messages = [
        Packed(data, [next(parts) for _ in range(arrays)], [next(parts)[0] for _ in range(refs)])
        for data, arrays, refs in heads
    ]
    return own, messages


def pack(content: Any, copy: bool = True) -> Packed:
    """Packs a message.

    Args:
        content: the message.
        copy: True if memory that it refers to may change before Ray has the message.
    """
    arrays: list[Bytes] = []
    refs: list[Any] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LEAST:
            return True
        array = np.frombuffer(raw, dtype=np.uint8)
        arrays.append(array.copy() if copy else array)
        return False

    file = io.BytesIO()
    _Pickler(file, refs, keep_inside).dump(content)
    return Packed(file.getvalue(), arrays, refs)


def pack_code(content: Any) -> tuple[bytes, list[Any]]:
    """Packs an object that may hold functions and classes that can't be imported elsewhere."""
    refs: list[Any] = []
    file = io.BytesIO()
    _CodePickler(file, refs).dump(content)
    return file.getvalue(), refs


def unpack(packed: Sequence[Any]) -> Any:
    """Unpacks a message. Its arrays can be written to, and use the memory that Ray delivered."""
    data, arrays, refs = packed
    return _Unpickler(io.BytesIO(data), refs, [writable(array) for array in arrays]).load()


def writable(array: Bytes) -> Bytes:
    """Returns a writable array over the memory of an array.

    Ray makes all arrays that it delivers read-only, as several processes may read them. A batch
    that one process made for another has no other readers, and PyTorch has no read-only tensors.
    """
    if array.flags.writeable:
        return array
    raw: Any = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    # Keeps the array, as Ray frees the memory with it.
    raw.owner = array
    same: Bytes = np.frombuffer(raw, dtype=np.uint8)
    return same


def is_ref(thing: Any) -> bool:
    """Tells whether an object is a reference to a Ray object or to an actor."""
    kind = type(thing)
    return kind.__module__.partition(".")[0] == "ray" and kind.__name__ in _REFERENCES


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, refs: list[Any], keep_inside: Any) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep_inside)
        self._refs = refs

    @override
    def persistent_id(self, obj: Any) -> int | None:
        if not is_ref(obj):
            return None
        self._refs.append(obj)
        return len(self._refs) - 1

    @override
    def reducer_override(self, obj: Any) -> Any:
        if "torch" not in sys.modules:
            return NotImplemented
        # Imported here, as a process without PyTorch may have messages, too, but without tensors.
        from trawl.backends.folding import reduced

        return NotImplemented if (made := reduced(obj)) is None else made


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, refs: list[Any]) -> None:
        super().__init__(file, protocol=5)
        self._refs = refs

    def persistent_id(self, obj: Any) -> int | None:
        if not is_ref(obj):
            return None
        self._refs.append(obj)
        return len(self._refs) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, refs: Sequence[Any], arrays: Sequence[Bytes]) -> None:
        super().__init__(file, buffers=arrays)
        self._refs = refs

    @override
    def persistent_load(self, pid: int) -> Any:
        return self._refs[pid]
