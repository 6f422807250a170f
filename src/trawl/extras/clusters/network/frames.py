"""Frames: messages to and from remote workers, as a pickle and separate buffers of memory."""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.backends.processes.payload import Package, ProgramPickler
from trawl.extras.clusters.launching.authentication import TAG_BYTES, Session

# Memory of at least this many bytes is sent separately, and not copied into the pickle.
_APART = 16_384
# The same limit for Ray, which is lower because Ray's object store does not use sockets.
_APART_FOR_RAY = 4096
_REFERENCES = ("ObjectRef", "ActorHandle")

Bytes = NDArray[np.uint8]

# Verbs: the kinds of messages.
MESSAGE, INTERRUPT, STOP, KILL, FAILED, ENDED = range(6)


class Request(NamedTuple):
    """Message to a worker, with the driver's last interruption.

    Attributes:
        content: the message.
        interruption: the number last passed to ``Worker.interrupt``, and the count of these calls.
    """

    content: Any
    interruption: tuple[int, int] = (0, 0)


class Delivery(NamedTuple):
    """Header of messages that a call, or the connection for requests, brings to a Ray actor.

    Attributes:
        heard: the count of the actor's messages that have arrived at the driver; None if the
            header does not report it.
        number: the position of this delivery among the deliveries with messages. Deliveries may
            arrive in any order.
        interruption: see :class:`Request`.
    """

    heard: int | None
    number: int
    interruption: tuple[int, int]

    def packed(self, messages: Sequence[Frame]) -> tuple[bytes, list[Any]]:
        """Packs the header and messages.

        Returns:
            The packed bytes, and a list of the messages' memory and references to Ray objects.
        """
        heads = [(one.verb, one.body, len(one.buffers), len(one.refs)) for one in messages]
        beside = [part for one in messages for part in (*one.buffers, *([ref] for ref in one.refs))]
        return pickle.dumps((self, heads), protocol=5), beside


def read_delivery(packed: bytes, beside: Sequence[Any]) -> tuple[Delivery, list[Frame]]:
    """Unpacks the result of :meth:`Delivery.packed`: the header, and the messages."""
    own, heads = pickle.loads(packed)
    parts = iter(beside)
    messages = [
        Frame(verb, body, list(islice(parts, memory)), [one[0] for one in islice(parts, refs)])
        for verb, body, memory, refs in heads
    ]
    return own, messages


@dataclass(frozen=True)
class Frame:
    """Message in the form in which it is sent.

    Attributes:
        verb: kind of the message.
        body: the content, pickled.
        buffers: large memory that the content refers to.
        refs: references to Ray objects in the content, kept apart so that Ray sees them.
    """

    verb: int
    body: bytes = b""
    buffers: Sequence[Any] = ()
    refs: Sequence[Any] = ()

    def content(self) -> Any:
        """Unpickles and returns the content. Its arrays use the memory of the buffers."""
        if not self.body:
            return None
        buffers = [writable(one) for one in self.buffers]
        return _Unpickler(io.BytesIO(self.body), self.refs, buffers).load()


def pack(verb: int, content: Any = None) -> Frame:
    """Packs a message; large arrays in its content are not copied."""
    buffers: list[Any] = []

    def within(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _APART:
            return True
        buffers.append(view)
        return False

    body = pickle.dumps(content, protocol=5, buffer_callback=within)
    return Frame(verb, body, buffers)


def pack_for_ray(content: Any, copy: bool = True) -> Frame:
    """Packs a message that may hold references to Ray objects.

    Args:
        content: the message.
        copy: True to copy memory that the message refers to. This is necessary if the memory may
            change before Ray has the message.
    """
    arrays: list[Bytes] = []
    refs: list[Any] = []

    def within(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _APART_FOR_RAY:
            return True
        array = np.frombuffer(raw, dtype=np.uint8)
        arrays.append(array.copy() if copy else array)
        return False

    file = io.BytesIO()
    _Pickler(file, refs, within).dump(content)
    return Frame(MESSAGE, file.getvalue(), arrays, refs)


def pack_code(content: Any) -> Frame:
    """Packs an object that may hold functions and classes that can't be imported elsewhere."""
    refs: list[Any] = []
    file = io.BytesIO()
    _CodePickler(file, refs).dump(content)
    return Frame(MESSAGE, file.getvalue(), (), refs)


def package_for_ray(parts: Sequence[Any], copied: Sequence[int] = ()) -> Package:
    """Returns a package of objects that may refer to Ray objects."""
    refs: list[Any] = []
    return Package(parts, copied, lambda file: _CodePickler(file, refs), refs)


def seal(frame: Frame, session: Session) -> Frame:
    """Puts an authentication tag before the body of a message to send.

    The tag covers the verb, the body and the sizes of the buffers. It does not cover the contents
    of the buffers: these are the memory of arrays, which is not unpickled.
    """
    return Frame(frame.verb, session.tag(_head(frame), frame.body) + frame.body, frame.buffers)


def unseal(frame: Frame, session: Session) -> Frame:
    """Checks the tag of a received message, and returns the message without it.

    Raises:
        AuthenticationError: if the message did not come from the other end.
    """
    tag, body = frame.body[:TAG_BYTES], frame.body[TAG_BYTES:]
    found = Frame(frame.verb, body, frame.buffers)
    session.check(tag, _head(found), body)
    return found


def _head(frame: Frame) -> bytes:
    sizes = [len(view) for view in frame.buffers]
    return struct.pack(f"!BI{len(sizes)}Q", frame.verb, len(sizes), *sizes)


def writable(array: Any) -> Any:
    """Returns a writable array over the memory of a read-only array; returns other memory as it is.

    Ray makes all arrays that it delivers read-only, because several processes may read them. A
    batch that one process made for another has no other readers, and PyTorch has no read-only
    tensors.
    """
    if not isinstance(array, np.ndarray) or array.flags.writeable:
        return array
    raw: Any = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    # Keeps the array alive, because Ray frees the memory together with the array.
    raw.owner = array
    same: Bytes = np.frombuffer(raw, dtype=np.uint8)
    return same


def is_ref(thing: Any) -> bool:
    """Returns True if an object is a reference to a Ray object or to an actor."""
    kind = type(thing)
    return kind.__module__.partition(".")[0] == "ray" and kind.__name__ in _REFERENCES


class _KeepsReferences:
    """Mixin for picklers that keep references to Ray objects apart from the pickle."""

    _refs: list[Any]

    def persistent_id(self, obj: Any) -> int | None:
        if not is_ref(obj):
            return None
        self._refs.append(obj)
        return len(self._refs) - 1


class _Pickler(_KeepsReferences, pickle.Pickler):
    def __init__(self, file: io.BytesIO, refs: list[Any], keep_inside: Any) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep_inside)
        self._refs = refs

    @override
    def reducer_override(self, obj: Any) -> Any:
        if "torch" not in sys.modules:
            return NotImplemented
        # Imported here, because a process without PyTorch may also have messages (but no tensors).
        from trawl.extras.clusters.network.folding import reduced

        return NotImplemented if (made := reduced(obj)) is None else made


class _CodePickler(_KeepsReferences, ProgramPickler):
    def __init__(self, file: io.BytesIO, refs: list[Any]) -> None:
        super().__init__(file)
        self._refs = refs


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, refs: Sequence[Any], arrays: Sequence[Bytes]) -> None:
        super().__init__(file, buffers=arrays)
        self._refs = refs

    @override
    def persistent_load(self, pid: int) -> Any:
        return self._refs[pid]
