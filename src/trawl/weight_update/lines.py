"""Channels that carry weights over a network to receivers outside of a collector.

The sender has a :class:`Line` to each receiver, and the receiver has an :class:`Inbox`. Only the
newest weights matter: weights that are replaced before they could be sent are never sent.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from trawl.weight_update.board import Posted
from trawl.weight_update.mailbox import Mailbox, Packet


class Line(ABC):
    """Sender's end of the channel to one receiver.

    Args:
        number: number of the receiver, for errors.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def begin(self) -> None:  # noqa: B027
        """Starts the channel; called once the receiver's process has been started."""

    @abstractmethod
    def send(self, packet: Packet) -> None:
        """Sends weights without waiting until they are taken."""

    @abstractmethod
    def wait(self, timeout: float | None) -> None:
        """Waits until the receiver has taken the last weights.

        Raises:
            TimeoutError: if the receiver does not take them in time.
            ConnectionError: if the receiver has ended.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the channel after the last weights have been sent."""


class Progress:
    """State of a channel: the packet to send next, and the counts of packets sent and taken."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._changed = threading.Condition()
        self._newest: Packet | None = None
        self._sent = self._taken = 0
        self._closed = self._lost = False

    def put(self, packet: Packet) -> None:
        """Sets the packet to send next, unless it is older than the last one."""
        with self._changed:
            if packet.count <= self._sent:
                # Packets may arrive out of order.
                return
            waiting = self._newest
            self._newest = packet if waiting is None else packet.after(waiting)
            self._sent = packet.count
            self._changed.notify_all()

    def next(self, wait: bool = True) -> Packet | None:
        """Returns the packet to send next, or None.

        Args:
            wait: whether to wait for a packet; None then means that the channel has ended.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._newest or self._closed or self._lost)
            packet, self._newest = self._newest, None
            return None if self._lost else packet

    def took(self, count: int) -> None:
        """Notes that the receiver has taken the packets up to number ``count``."""
        with self._changed:
            self._taken = max(self._taken, count)
            self._changed.notify_all()

    def lose(self) -> None:
        """Notes that the receiver has ended."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def close(self) -> None:
        """Notes that nothing more will be sent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, timeout: float | None, count: int | None = None) -> None:
        """Waits until packets up to ``count``, or all, are taken; raises as :meth:`Line.wait`."""
        with self._changed:
            wanted = self._sent if count is None else count
            self._changed.wait_for(lambda: self._taken >= wanted or self._lost, timeout)
            if self._taken >= wanted:
                return
            if self._lost:
                raise ConnectionError(f"receiver {self.number} has ended, and took no weights")
            raise TimeoutError(f"receiver {self.number} took no weights within {timeout:.3g} s")


class Inbox:
    """Receiver's end of a channel: a mailbox that a thread fills.

    Args:
        took: called with the number of a packet when the receiver takes it.

    Attributes:
        count: number of the packet that was taken last.
    """

    def __init__(self, took: Callable[[int], None]) -> None:
        self.count = 0
        self._took = took
        self._box = Mailbox()
        self._changed = threading.Condition()
        self._ended = False

    @property
    def newer(self) -> bool:
        """True if there is a packet that was not taken."""
        return self._box.newer

    def put(self, packet: Packet) -> None:
        """Stores a packet."""
        with self._changed:
            self._box.put(packet)
            self._changed.notify_all()

    def end(self) -> None:
        """Notes that the sender has ended."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Waits for a new packet; returns False if none arrives in time.

        Raises:
            ConnectionError: if the sender has ended, and all its packets were taken.
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

    def take(self, use: Callable[[Posted], None]) -> Posted:
        """Takes and returns the newest weights; calls ``use`` with them, if there are any."""
        with self._changed:
            posted = self._box.take(use)
        self.count = posted.count
        self._took(posted.count)
        return posted


def way_of(ways: Mapping[int, Any], worker: int) -> Any:
    """Returns the channel to a receiver.

    Raises:
        ValueError: if the sender has no receiver of this number.
    """
    if worker not in ways:
        raise ValueError(f"worker_idx is {worker}, but the sender has receivers {sorted(ways)}")
    return ways[worker]
