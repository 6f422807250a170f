"""Frames, the form of messages to and from remote workers: a pickle, and large memory apart."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trawl.backends.authentication import TAG_BYTES, Session

# Memory of at least this many bytes is sent separately, and not copied into the pickle.
_APART = 16_384

# Verbs: the kinds of messages.
MESSAGE, INTERRUPT, STOP, KILL, FAILED, ENDED = range(6)


class Request(NamedTuple):
    """Message to a worker, with updates that the worker may not have received yet.

    Attributes:
        content: the message.
        interruption: the number of the last interruption, and how many there were so far.
        heard: how many of the worker's messages have arrived.
    """

    content: Any
    interruption: tuple[int, int] = (0, 0)
    heard: int = 0


@dataclass(frozen=True)
class Frame:
    """Frame message.

    Attributes:
        verb: kind of the message.
        body: the content, pickled.
        buffers: large memory that the content refers to.
    """

    verb: int
    body: bytes = b""
    buffers: Sequence[Any] = field(default=())

    def content(self) -> Any:
        """Unpickles and returns the content."""
        return pickle.loads(self.body, buffers=self.buffers) if self.body else None


def pack(verb: int, content: Any = None) -> Frame:
    """Packs a message; large arrays in its content are not copied."""
    buffers: list[memoryview] = []

    def within(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _APART:
            return True
        buffers.append(view)
        return False

    body = pickle.dumps(content, protocol=5, buffer_callback=within)
    return Frame(verb, body, buffers)


def seal(frame: Frame, session: Session) -> Frame:
    """Puts an authentication tag before the body of a message to send.

    The tag covers the verb, the body and the sizes of the buffers. It does not cover the contents
    of the buffers: these are the memory of arrays, which is not unpickled.
    """
    return Frame(frame.verb, session.tag(_head(frame), frame.body) + frame.body, frame.buffers)


def unseal(frame: Frame, session: Session) -> Frame:
    """Checks the tag of a received message, and returns the message without it.

    Raises:
        AuthenticationError: if the other end did not send the message.
    """
    tag, body = frame.body[:TAG_BYTES], frame.body[TAG_BYTES:]
    found = Frame(frame.verb, body, frame.buffers)
    session.check(tag, _head(found), body)
    return found


def _head(frame: Frame) -> bytes:
    sizes = [len(view) for view in frame.buffers]
    return struct.pack(f"!BI{len(sizes)}Q", frame.verb, len(sizes), *sizes)
