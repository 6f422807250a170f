"""Messages to and from Ray actors: pickles whose large arrays and object references lie beside.

Ray carries arrays through its object store, and there they are read where they are: nothing is
copied on the side that takes the message.
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

# An array of fewer bytes is as well off in the pickle itself.
_LEAST = 4096
_REFERENCES = ("ObjectRef", "ActorHandle")

Bytes = NDArray[np.uint8]


class Packed(NamedTuple):
    """A message.

    Attributes:
        data: the pickle.
        arrays: the memory of large arrays.
        refs: references to Ray's objects, which Ray has to see.
    """

    data: bytes
    arrays: list[Bytes]
    refs: list[Any]


class Letter(NamedTuple):
    """What a call brings to an actor, beside messages.

    Attributes:
        heard: how much the other side has of what the actor said; None if it does not tell.
        number: the number of the call among those with messages; they may come in any order.
        interruption: the last interruption before the messages: its number, how many there were.
    """

    heard: int | None
    number: int
    interruption: tuple[int, int]

    def packed(self, messages: Sequence[Packed]) -> tuple[bytes, list[Any]]:
        """The letter with messages, and the arrays and references of these, for Ray to see."""
        heads = [(data, len(arrays), len(refs)) for data, arrays, refs in messages]
        beside = [
            part for _, arrays, refs in messages for part in (*arrays, *([ref] for ref in refs))
        ]
        return pickle.dumps((self, heads), protocol=5), beside


def read_letter(letter: bytes, beside: Sequence[Any]) -> tuple[Letter, list[Packed]]:
    """What :meth:`Letter.packed` has put together."""
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
        copy: whether what it refers to may change before Ray has the message.
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
    """Packs what may hold functions and classes that can't be imported elsewhere."""
    refs: list[Any] = []
    file = io.BytesIO()
    _CodePickler(file, refs).dump(content)
    return file.getvalue(), refs


def unpack(packed: Sequence[Any]) -> Any:
    """The message. Its arrays can be written to, and are the memory that Ray brought."""
    data, arrays, refs = packed
    return _Unpickler(io.BytesIO(data), refs, [writable(array) for array in arrays]).load()


def writable(array: Bytes) -> Bytes:
    """The same memory, without the mark that it is not to be written to.

    Ray marks all that it brings, as several processes may read it. A batch that one process made
    for another has no other readers, and PyTorch has no tensors that can't be written to.
    """
    if array.flags.writeable:
        return array
    raw: Any = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    # Ray lets go of its memory with the array.
    raw.owner = array
    same: Bytes = np.frombuffer(raw, dtype=np.uint8)
    return same


def is_ref(thing: Any) -> bool:
    """Whether this is a reference to an object of Ray, or to an actor."""
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
        # Imported here, as a message may be one without tensors, in a process without PyTorch.
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
