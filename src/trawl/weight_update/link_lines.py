"""Channels for weights over process groups of two: the sender and one receiver."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Protocol

from typing_extensions import override

from trawl.backends.authentication import KEY_BYTES
from trawl.backends.link import GONE, STATE, Address, Link, hosted_store
from trawl.backends.remote_packing import MESSAGE, STOP, Packed, pack
from trawl.weight_update.lines import Inbox, Line, Progress
from trawl.weight_update.mailbox import Packet

# Seconds that a sender waits at shutdown until the last weights have been sent.
_LAST = 5.0


class Meeting:
    """Rendezvous of a sender and its receivers: a TCP store in the sender's process.

    Args:
        host: address of this machine, at which the store listens.
        port: port of the store; 0 for any free port.
        timeout: seconds that sender and receiver wait for each other.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._host, self._timeout = host, timeout
        self._store, self._port = hosted_store(host, port, timeout)
        self._count = 0

    def line(self, worker: int) -> LinkLine:
        """Returns a new channel to a receiver; the replacement of a receiver gets another one."""
        self._count += 1
        prefix, key = f"weights/{self._count}", os.urandom(KEY_BYTES)
        address = Address(self._host, self._port, self._timeout, prefix, key)
        return LinkLine(worker, address, self)

    def lines(self, workers: Sequence[int]) -> dict[int, LinkLine]:
        """Returns a new channel to each receiver."""
        return {worker: self.line(worker) for worker in workers}

    def give_up(self, prefix: str) -> None:
        """Ends the wait for a receiver that has not come."""
        self._store.set(f"{prefix}/{STATE}", GONE)


class LinkLine(Line):
    """Sender's end of a channel.

    Args:
        number: number of the receiver, for errors.
        address: address at which sender and receiver meet.
        meeting: rendezvous that holds the store at that address.
    """

    def __init__(self, number: int, address: Address, meeting: Meeting) -> None:
        super().__init__(number)
        self.address = address
        self._meeting = meeting
        self._progress = Progress(number)
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._linked = False

    @override
    def begin(self) -> None:
        self._thread.start()

    @override
    def send(self, packet: Packet) -> None:
        self._progress.put(packet)

    @override
    def wait(self, timeout: float | None) -> None:
        self._progress.wait(timeout)

    @override
    def close(self) -> None:
        self._progress.close()
        if not self._linked:
            self._meeting.give_up(self.address.prefix)
        if self._thread.is_alive():
            self._thread.join(_LAST)

    def _talk(self) -> None:
        # If the receiver does not come, or is gone, ``lose`` below ends all waits for it.
        with contextlib.suppress(Exception):
            link = self.address.link(0)
            self._linked = True
            threading.Thread(target=self._listen, args=(link,), daemon=True).start()
            # The receiver expects this first message at once: earlier weights, or None.
            link.send(pack(MESSAGE, self._progress.next(wait=False)))
            while (packet := self._progress.next()) is not None:
                link.send(pack(MESSAGE, packet))
            link.send(Packed(STOP))
            return
        self._progress.lose()

    def _listen(self, link: Link) -> None:
        with contextlib.suppress(RuntimeError):
            while True:
                self._progress.took(link.receive().content())
        self._progress.lose()


class Sink(Protocol):
    """Object that takes the packets of a channel."""

    def put(self, packet: Packet) -> None:
        """Stores a packet."""

    def end(self) -> None:
        """Notes that the sender has ended."""


def connected(address: Address) -> Link:
    """Returns the receiver's connection; waits for the sender."""
    return address.link(1)


def joined(address: Address) -> Inbox:
    """Returns the receiver's end of a channel; waits for the sender."""
    link = connected(address)

    def took(count: int) -> None:
        # A sender that has ended needs no acknowledgement.
        with contextlib.suppress(RuntimeError):
            link.send(pack(MESSAGE, count))

    inbox = Inbox(took)
    listen(link, inbox)
    return inbox


def listen(link: Link, sink: Sink) -> None:
    """Passes the first packet, if any, to a sink, and starts a thread that passes the others."""
    first = link.receive().content()
    if first is not None:
        sink.put(first)
    threading.Thread(target=_listen, args=(link, sink), daemon=True).start()


def _listen(link: Link, sink: Sink) -> None:
    with contextlib.suppress(RuntimeError):
        while (packed := link.receive()).verb != STOP:
            sink.put(packed.content())
    sink.end()
