"""Ways of weights over a network to receivers that are no workers of a collector.

The sender has a :class:`Line` to each, the receiver an :class:`Inbox`. Only the newest weights
matter: those that were replaced before they could be sent are not sent.
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
    """The sender's end of the way to one receiver.

    Args:
        number: what the receiver is called in errors.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def begin(self) -> None:  # noqa: B027
        """Called when the receiver's process has been started."""

    @abstractmethod
    def send(self, packet: Packet) -> None:
        """Sends weights, and doesn't wait until they are taken."""

    @abstractmethod
    def wait(self, timeout: float | None) -> None:
        """Waits until the receiver has taken what was sent last.

        Raises:
            TimeoutError: if it does not in time.
            ConnectionError: if it has ended.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the way, once what was sent has gone."""


class Progress:
    """What was sent to a receiver, and how much of it that has taken."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._changed = threading.Condition()
        self._newest: Packet | None = None
        self._sent = self._taken = 0
        self._closed = self._lost = False

    def put(self, packet: Packet) -> None:
        """There are newer weights."""
        with self._changed:
            if packet.count <= self._sent:
                # They may come in another order.
                return
            waiting = self._newest
            self._newest = packet if waiting is None else packet.after(waiting)
            self._sent = packet.count
            self._changed.notify_all()

    def next(self, wait: bool = True) -> Packet | None:
        """The newest that was not given before.

        Args:
            wait: whether it is waited for; then None means the end.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._newest or self._closed or self._lost)
            packet, self._newest = self._newest, None
            return None if self._lost else packet

    def took(self, count: int) -> None:
        """The receiver has taken so many."""
        with self._changed:
            self._taken = max(self._taken, count)
            self._changed.notify_all()

    def lose(self) -> None:
        """The receiver has ended."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more is sent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, timeout: float | None, count: int | None = None) -> None:
        """Waits until so many were taken, or all that were sent; raises as :meth:`Line.wait`."""
        with self._changed:
            wanted = self._sent if count is None else count
            self._changed.wait_for(lambda: self._taken >= wanted or self._lost, timeout)
            if self._taken >= wanted:
                return
            if self._lost:
                raise ConnectionError(f"receiver {self.number} has ended, and took no weights")
            raise TimeoutError(f"receiver {self.number} took no weights within {timeout:.3g} s")


class Inbox:
    """The receiver's end: a mailbox that a thread fills.

    Args:
        took: called with the number of weights that were sent, when the newest are taken.

    Attributes:
        count: how many had been sent when the newest was taken.
    """

    def __init__(self, took: Callable[[int], None]) -> None:
        self.count = 0
        self._took = took
        self._box = Mailbox()
        self._changed = threading.Condition()
        self._ended = False

    @property
    def newer(self) -> bool:
        """Whether there is something that was not taken."""
        return self._box.newer

    def put(self, packet: Packet) -> None:
        """Takes in what was sent."""
        with self._changed:
            self._box.put(packet)
            self._changed.notify_all()

    def end(self) -> None:
        """The sender has ended."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Waits until there is something new; tells whether there is.

        Raises:
            ConnectionError: if the sender has ended, and all it sent was taken.
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
        """Takes the newest: ``use`` is called with it while it can't change."""
        with self._changed:
            posted = self._box.take(use)
        self.count = posted.count
        self._took(posted.count)
        return posted


def way_of(ways: Mapping[int, Any], worker: int) -> Any:
    """The way to a receiver.

    Raises:
        ValueError: if the sender knows no such receiver.
    """
    if worker not in ways:
        raise ValueError(f"worker_idx is {worker}, but the sender has receivers {sorted(ways)}")
    return ways[worker]
