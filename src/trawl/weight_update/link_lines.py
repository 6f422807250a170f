"""Weights over process groups of two: a sender, and a receiver in any other process."""

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

# Seconds for what was sent last to go, once the sender shuts down.
_LAST = 5.0


class Meeting:
    """Where a sender waits for receivers: a TCP store in its process.

    Args:
        host: the address of this machine that it listens at.
        port: the port there; 0 for any that is free.
        timeout: seconds that the two wait for each other.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._host, self._timeout = host, timeout
        self._store, self._port = hosted_store(host, port, timeout)
        self._count = 0

    def line(self, worker: int) -> LinkLine:
        """A way to a receiver, or to the one that takes its place."""
        self._count += 1
        prefix, key = f"weights/{self._count}", os.urandom(KEY_BYTES)
        address = Address(self._host, self._port, self._timeout, prefix, key)
        return LinkLine(worker, address, self)

    def lines(self, workers: Sequence[int]) -> dict[int, LinkLine]:
        """Ways to receivers."""
        return {worker: self.line(worker) for worker in workers}

    def give_up(self, prefix: str) -> None:
        """Ends the wait for who has not come."""
        self._store.set(f"{prefix}/{STATE}", GONE)


class LinkLine(Line):
    """The sender's end.

    Args:
        number: what the receiver is called in errors.
        address: where the two meet.
        meeting: who holds the store there.
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
        # A receiver that does not come, or is gone: who waits for it hears that.
        with contextlib.suppress(Exception):
            link = self.address.link(0)
            self._linked = True
            threading.Thread(target=self._listen, args=(link,), daemon=True).start()
            # What was sent before is there as soon as the receiver is.
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
    """What takes in what comes by a line."""

    def put(self, packet: Packet) -> None:
        """Takes in what was sent."""

    def end(self) -> None:
        """The sender has ended."""


def connected(address: Address) -> Link:
    """The receiver's connection; waits until the sender is there."""
    return address.link(1)


def joined(address: Address) -> Inbox:
    """The receiver's end; waits until the sender is there."""
    link = connected(address)

    def took(count: int) -> None:
        # A sender that has ended need not hear of it.
        with contextlib.suppress(RuntimeError):
            link.send(pack(MESSAGE, count))

    inbox = Inbox(took)
    listen(link, inbox)
    return inbox


def listen(link: Link, sink: Sink) -> None:
    """Takes in what was sent before, and what comes later by a thread of its own."""
    first = link.receive().content()
    if first is not None:
        sink.put(first)
    threading.Thread(target=_listen, args=(link, sink), daemon=True).start()


def _listen(link: Link, sink: Sink) -> None:
    with contextlib.suppress(RuntimeError):
        while (packed := link.receive()).verb != STOP:
            sink.put(packed.content())
    sink.end()
