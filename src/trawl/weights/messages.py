"""Messages with weights, where memory can't be shared.

The newest message wins: a message that is replaced before it could be sent is never sent. The
receiver acknowledges a message by its number.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.weights.layout import FlatLayout, Slot, Write
from trawl.weights.store import Store, Version, WeightUpdate
from trawl.weights.tensors import Weights


class WeightCodec:
    """The form in which messages carry weights: what :meth:`encode` returns for their bytes.

    All messages pass here, in processes, over networks and, by a subclass, in Ray's object store.

    Attributes:
        copies: True if what is carried does not refer to the memory that is encoded, which is then
            used again.
    """

    copies = False

    def encode(self, weights: NDArray[np.uint8]) -> Any:
        """Returns what a message carries; called once for all receivers of the weights."""
        return weights

    def decode(self, data: Any) -> Any:
        """Returns the weights as bytes, in memory that can be written to."""
        return data


PLAIN = WeightCodec()


@dataclass(frozen=True, eq=False)
class WeightMessage:
    """A message with weights.

    Attributes:
        count: number of messages sent to this receiver, including this one.
        version: version of the weights; None if versions are not tracked.
        layout: layout of the weights; None if only the version is new.
        data: the weights, encoded.
        extra: extra state, pickled.
        codec: decodes the weights.
    """

    count: int
    version: Version = None
    layout: FlatLayout | None = None
    data: Any = None
    extra: bytes = b""
    codec: WeightCodec = PLAIN

    def slot(self) -> Slot:
        """Returns the weights, of which there must be some."""
        assert self.layout is not None
        return Slot(self.layout, self.codec.decode(self.data))

    def update(self, since: int = 0) -> WeightUpdate:
        """Returns the weights as an update, for a receiver that already has update ``since``."""
        slot = None if self.layout is None else self.slot()
        return WeightUpdate(self.count, self.version, slot, self.extra, since)

    def after(self, waiting: WeightMessage | None) -> WeightMessage:
        """Returns the message to deliver in place of this one and an earlier one.

        If this message has only a version, the result combines it with the weights of the earlier
        message.

        Args:
            waiting: the earlier message, which was not received; None if there is none.
        """
        if waiting is None or self.layout is not None:
            return self
        return replace(waiting, count=self.count, version=self.version)


class MessageStore(Store):
    """Sender's side of messages, which are packed once for all receivers that get the same weights.

    Args:
        send: function that sends a message to a receiver, given by its number, without waiting.
        codec: encodes the weights.
    """

    def __init__(
        self, send: Callable[[int, WeightMessage], None], codec: WeightCodec = PLAIN
    ) -> None:
        super().__init__()
        self._send, self._codec = send, codec
        # The memory that was encoded last. Writing to used memory takes half as long as writing to
        # new memory.
        self._used = np.empty(0, dtype=np.uint8)
        # Newest message to each receiver. A replacement of the receiver starts with this message.
        self._newest: dict[int, WeightMessage] = {}
        # The same weights for all receivers that got them, without a number and a version.
        self._packed: dict[int, WeightMessage] = {}

    @override
    def reader(self, index: int) -> Inbox:
        return Inbox(self._newest.get(index))

    @override
    def count(self, index: int) -> int:
        known = self._newest.get(index)
        return 0 if known is None else known.count

    @override
    def newest(self, index: int) -> Weights | None:
        known = self._newest.get(index)
        return None if known is None or known.layout is None else known.update().copy()

    def add(self, index: int, like: int) -> None:
        """Adds a receiver, which starts with the newest weights of another one."""
        if like in self._newest:
            self._newest[index] = replace(self._newest[like], count=1)
        if like in self._packed:
            self._packed[index] = self._packed[like]

    @override
    def publish_version(self, version: Version, readers: Iterable[int]) -> None:
        for index in readers:
            self._put(index, WeightMessage(self.count(index) + 1, version))

    @override
    def _held(self, index: int) -> WeightMessage | None:
        return self._packed.get(index)

    @override
    def _fill(
        self, layout: FlatLayout, write: Write, extra: bytes, before: WeightMessage | None
    ) -> tuple[WeightMessage, bool]:
        buffer = self._used
        if not self._codec.copies or buffer.nbytes != layout.nbytes:
            buffer = self._used = np.empty(layout.nbytes, dtype=np.uint8)
        kept, old = (b"", None) if before is None else (before.extra, before.slot)
        more, complete = self._fill_slot(Slot(layout, buffer), write, extra, kept, old)
        data = self._codec.encode(buffer)
        return WeightMessage(0, None, layout, data, more, self._codec), complete

    @override
    def _announce(self, readers: Sequence[int], version: Version, filled: WeightMessage) -> None:
        for index in readers:
            self._packed[index] = filled
            self._put(index, replace(filled, count=self.count(index) + 1, version=version))

    def _put(self, index: int, message: WeightMessage) -> None:
        # A receiver that starts later needs the earlier weights, too.
        self._newest[index] = message.after(self._newest.get(index))
        self._send(index, message)


class Channel(ABC):
    """Sender's end of a channel to one receiver outside of a collector."""

    @abstractmethod
    def connect_sender(self) -> None:
        """Starts the channel; called once the receiver's process has been started."""

    @abstractmethod
    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits until the receiver has received the last weights.

        Raises:
            TimeoutError: if the receiver does not receive them in time.
            ConnectionError: if the receiver has ended.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the channel after the last weights have been sent."""


class MessageChannel(Channel):
    """Sender's end of a channel that carries messages."""

    @abstractmethod
    def send(self, message: WeightMessage) -> None:
        """Sends a message without waiting until it is received."""


def late(receiver: int, timeout: float | None) -> TimeoutError:
    """Returns the error for a receiver that did not receive weights in time."""
    return TimeoutError(f"receiver {receiver} did not receive the weights within {timeout:.3g} s")


def lost(receiver: int) -> ConnectionError:
    """Returns the error for a receiver that has ended."""
    return ConnectionError(f"receiver {receiver} ended before it received the weights")


class Outbox:
    """Message to send next, and the numbers of the messages sent and acknowledged.

    Args:
        number: number of the receiver, for error messages.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._changed = threading.Condition()
        self._newest: WeightMessage | None = None
        self._sent = self._received = 0
        self._closed = self._lost = False

    def put(self, message: WeightMessage) -> None:
        """Sets the message to send next, unless it is older than the last one."""
        with self._changed:
            if message.count > self._sent:
                self._newest = message.after(self._newest)
                self._sent = message.count
                self._changed.notify_all()

    def next(self, wait: bool = True) -> WeightMessage | None:
        """Returns the message to send next, or None.

        Args:
            wait: whether to wait for a message. If True, a result of None means that the channel
                has ended.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._newest or self._closed or self._lost)
            message, self._newest = self._newest, None
            return None if self._lost else message

    def acknowledge(self, count: int) -> None:
        """Records that the receiver has received the messages up to number ``count``."""
        with self._changed:
            self._received = max(self._received, count)
            self._changed.notify_all()

    def close(self, lost: bool = False) -> None:
        """Records that nothing more will be sent, or that the receiver is lost."""
        with self._changed:
            self._closed, self._lost = True, self._lost or lost
            self._changed.notify_all()

    def wait_ack(self, timeout: float | None, count: int | None = None) -> None:
        """Waits until all messages, or those up to number ``count``, have been received.

        Raises:
            Exception: the errors of :meth:`MessageChannel.wait_ack`.
        """
        with self._changed:
            wanted = self._sent if count is None else count
            self._changed.wait_for(lambda: self._received >= wanted or self._lost, timeout)
            if self._received >= wanted:
                return
            raise lost(self._number) if self._lost else late(self._number, timeout)


class Inbox:
    """Receiver's end of a channel, which keeps only the newest message.

    Args:
        message: message that was sent before the receiver started.
        acknowledge: function to call with the number of each received message.

    Attributes:
        count: number of the message that was received last.
    """

    def __init__(
        self,
        message: WeightMessage | None = None,
        acknowledge: Callable[[int], Any] = lambda count: None,
    ) -> None:
        self.count = 0
        self._message = message
        self._acknowledge = acknowledge
        self._since = 0
        self._changed = threading.Condition()
        self._ended = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Inbox, (self._message,)

    @property
    def newer(self) -> bool:
        """True if there is a message that has not been received yet."""
        return self._message is not None

    def put(self, message: WeightMessage) -> None:
        """Stores a message, unless it is older than the newest one."""
        with self._changed:
            if message.count > max(self.count, self._message.count if self._message else 0):
                self._message = message.after(self._message)
                self._changed.notify_all()

    def end(self) -> None:
        """Records that the sender has ended."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Waits for a new message; returns False if none arrives in time.

        Raises:
            ConnectionError: if the sender has ended, and all its messages have been received.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self.newer:
                left = None if deadline is None else deadline - time.monotonic()
                if self._ended:
                    raise ConnectionError("the sender of weights has ended")
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def receive(self, use: Callable[[WeightUpdate], None]) -> WeightUpdate:
        """Receives and returns the newest update; ``use`` is called with it.

        If there is no new update, ``use`` is not called, and the result has no weights.
        """
        with self._changed:
            if self._message is None:
                return WeightUpdate(self.count)
            update = self._message.update(self._since)
            use(update)
            self._message, self.count, self._since = None, update.count, update.newest
        self._acknowledge(update.count)
        return update
