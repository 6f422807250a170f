"""Weights of a collector that travel through their own channel, apart from its messages.

In place of the weights, a message carries a ticket. The ticket keeps its place among the worker's
requests, so the worker takes the weights in the right order although they arrive separately.
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
    """Returns the ticket for a packet; a packet without weights is returned as it is."""
    return packet if packet.packing is None else replace(packet, data=packet.count, extra=b"")


class Feed:
    """Packets from the channel that wait for their tickets."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._packets: dict[int, Packet] = {}
        self._ended = False

    def put(self, packet: Packet) -> None:
        """Stores a packet."""
        with self._changed:
            self._packets[packet.count] = packet
            self._changed.notify_all()

    def end(self) -> None:
        """Notes that the sender has ended."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def get(self, count: int) -> Packet:
        """Waits for the packet of a number, or for the next one if that packet was replaced.

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
    """Mailbox of a worker whose messages carry tickets in place of weights.

    Args:
        address: address of the sender's end of the channel.
        packet: ticket for the packet that was sent before the worker started.
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
                # The weights got another version after they were sent.
                found = replace(found, count=waiting.count, version=waiting.version)
            self._packet = found
        return super().take(use)
