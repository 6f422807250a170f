"""Messages to and from workers in other places, in parts as a network takes them."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trawl.backends.authentication import TAG_BYTES, Session

# Memory of at least this size is sent by itself, and not copied into the pickle.
_APART = 16_384

# What a message is.
MESSAGE, INTERRUPT, STOP, KILL, FAILED, ENDED = range(6)


class Order(NamedTuple):
    """What a worker is told, and what it may not know yet.

    Attributes:
        content: what it is told.
        interruption: the last one, as a number and how many there were.
        heard: how many of its messages have come.
    """

    content: Any
    interruption: tuple[int, int] = (0, 0)
    heard: int = 0


@dataclass(frozen=True)
class Packed:
    """A message.

    Attributes:
        verb: what it is.
        body: its content, pickled.
        buffers: large memory that the content refers to.
    """

    verb: int
    body: bytes = b""
    buffers: Sequence[Any] = field(default=())

    def content(self) -> Any:
        """What was sent."""
        return pickle.loads(self.body, buffers=self.buffers) if self.body else None


def pack(verb: int, content: Any = None) -> Packed:
    """A message with a content, of which large arrays are not copied."""
    buffers: list[memoryview] = []

    def within(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _APART:
            return True
        buffers.append(view)
        return False

    body = pickle.dumps(content, protocol=5, buffer_callback=within)
    return Packed(verb, body, buffers)


def seal(packed: Packed, session: Session) -> Packed:
    """Puts a tag before the body of a message that is sent.

    The tag covers the verb, the body and the sizes of the buffers. What is in the buffers it does
    not cover: these are the memory of arrays, which nobody unpickles.
    """
    return Packed(
        packed.verb, session.tag(_head(packed), packed.body) + packed.body, packed.buffers
    )


def unseal(packed: Packed, session: Session) -> Packed:
    """Takes the tag from a message that came, if the other end has sent that.

    Raises:
        AuthenticationError: otherwise.
    """
    tag, body = packed.body[:TAG_BYTES], packed.body[TAG_BYTES:]
    found = Packed(packed.verb, body, packed.buffers)
    session.check(tag, _head(found), body)
    return found


def _head(packed: Packed) -> bytes:
    sizes = [len(view) for view in packed.buffers]
    return struct.pack(f"!BI{len(sizes)}Q", packed.verb, len(sizes), *sizes)
