"""Weights of a collector that go by lines of their own, beside its messages.

In their place a message brings a ticket. So a worker takes them in the order in which they were
sent among its orders, though they come another way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from typing_extensions import override

from trawl.backends.link import Address
from trawl.weight_update.board import Posted
from trawl.weight_update.link_lines import connected, listen
from trawl.weight_update.mailbox import Mailbox, Packet


def ticket(packet: Packet) -> Packet:
    """What says that weights come by a line; what has none is left as it is."""
    return packet if packet.packing is None else replace(packet, data=packet.count, extra=b"")


class Feed:
    """What came by a line, until tickets for it come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._packets: dict[int, Packet] = {}
        self._ended = False

    def put(self, packet: Packet) -> None:
        """Takes in what was sent."""
        with self._changed:
            self._packets[packet.count] = packet
            self._changed.notify_all()

    def end(self) -> None:
        """The sender has ended."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def get(self, count: int) -> Packet:
        """The packet of a number, or the next after it, if that one was replaced; waits for it.

        Raises:
            ConnectionError: if the sender has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or max(self._packets, default=-1) >= count)
            later = [number for number in self._packets if number >= count]
            if not later:
                raise ConnectionError("the sender of weights has ended")
            found = self._packets[min(later)]
            self._packets = {n: p for n, p in self._packets.items() if n > found.count}
            return found


class TicketMailbox(Mailbox):
    """Where a worker finds weights of which only tickets come with its other messages.

    Args:
        address: where the line begins.
        packet: a ticket for what was sent before the worker began.
    """

    def __init__(self, address: Address, packet: Packet | None) -> None:
        super().__init__(packet)
        self._address = address
        self._feed: Feed | None = None

    @override
    def take(self, use: Callable[[Posted], None]) -> Posted:
        waiting = self._packet
        if waiting is not None and waiting.packing is not None:
            if self._feed is None:
                self._feed = Feed()
                listen(connected(self._address), self._feed)
            found = self._feed.get(waiting.data)
            if waiting.count > found.count:
                # They were given another version after they had been sent.
                found = replace(found, count=waiting.count, version=waiting.version)
            self._packet = found
        return super().take(use)
