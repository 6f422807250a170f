"""Schemes that send weights through process groups, and their channels."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from trawl.backends.frames import MESSAGE, STOP, Frame, pack
from trawl.backends.launching.authentication import KEY_BYTES
from trawl.backends.link import GONE, STATE, Address, Link, check_name, hosted_store
from trawl.weights.groups import entry_of
from trawl.weights.message_schemes import MessageWeightSyncScheme
from trawl.weights.messages import Inbox, MessageChannel, Outbox, WeightMessage
from trawl.weights.scheme import TransportBackend

# Seconds that a sender waits at shutdown until the last weights have been sent.
_LAST = 5.0


class GroupWeightSyncScheme(MessageWeightSyncScheme):
    """Base class of schemes that, without a collector, use a process group for each receiver.

    The members of each group are the sender and the receiver.

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.
    """

    def __init__(self, strategy: str = "tensordict") -> None:
        super().__init__(strategy)
        # Address at which the sender meets each receiver.
        self._addresses: dict[int, Address] = {}

    @abstractmethod
    def _meeting(self) -> tuple[str, int, float]:
        """Returns the host and port of the sender's store, and the timeout for connecting."""

    @override
    def _new_channels(self, workers: Sequence[int]) -> dict[int, MessageChannel]:
        host, port, timeout = self._meeting()
        store, port = hosted_store(host, port, timeout)
        self._addresses = {
            worker: Address(host, port, timeout, f"weights/{worker}", os.urandom(KEY_BYTES))
            for worker in workers
        }
        return {w: LinkChannel(w, address, store) for w, address in self._addresses.items()}

    @override
    def _join(self, worker: int) -> Inbox:
        return joined(entry_of(self._addresses, worker))


class DistributedWeightSyncScheme(GroupWeightSyncScheme, backends=("distributed",)):
    """Sends weights over a network, through process groups.

    With a collector, weights travel over its connections to its ranks. Without a collector, the
    scheme makes a process group of two with each receiver, in any process on any machine.

    Args:
        backend: the kind of process group; only ``"gloo"`` can be used.
        sync: accepted for compatibility. Sending never waits, and batches that begin later use
            the new weights.
        timeout: seconds that a sender and a receiver wait for each other when they connect.
        address: without a collector, address of the sender's machine, to which receivers connect.
            The default can be reached only from this machine.
        port: without a collector, port at that address; 0 for any free port.

    Raises:
        ValueError: if ``backend`` is another kind of process group, or ``timeout`` is not above 0.

    Examples:
        >>> from trawl.weight_update import DistributedWeightSyncScheme
        >>> DistributedWeightSyncScheme(timeout=60.0).timeout
        60.0
    """

    transport = "network_transports.DistributedTransport"

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        timeout: float = 3600.0,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__()
        check_name(backend)
        if not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds above 0, but it is {timeout!r}")
        self.backend = backend
        self.sync = sync
        self.timeout = timeout
        self._place = address, port

    @override
    def _meeting(self) -> tuple[str, int, float]:
        return (*self._place, self.timeout)

    @override
    def create_transport(self, **options: Any) -> TransportBackend:
        return super().create_transport(**{"sync": self.sync, **options})


class LinkChannel(MessageChannel):
    """Channel through a process group of two: the sender and one receiver.

    Args:
        number: number of the receiver, for error messages.
        address: address at which sender and receiver meet.
        store: the TCP store at that address, in this process.
    """

    def __init__(self, number: int, address: Address, store: Any) -> None:
        self._address = address
        self._store = store
        self._outbox = Outbox(number)
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._linked = False

    @override
    def connect_sender(self) -> None:
        self._thread.start()

    @override
    def send(self, message: WeightMessage) -> None:
        self._outbox.put(message)

    @override
    def wait_ack(self, timeout: float | None = None) -> None:
        self._outbox.wait_ack(timeout)

    @override
    def close(self) -> None:
        self._outbox.close()
        if not self._linked:
            # Ends the wait for a receiver that has not joined.
            self._store.set(f"{self._address.prefix}/{STATE}", GONE)
        if self._thread.is_alive():
            self._thread.join(_LAST)

    def _send_all(self) -> None:
        # If the receiver does not join, or is gone, the last line ends all waits for the receiver.
        with contextlib.suppress(Exception):
            link = self._address.link(0)
            self._linked = True
            threading.Thread(target=self._receive_all, args=(link,), daemon=True).start()
            # The receiver expects this first message at once: earlier weights, or None.
            link.send(pack(MESSAGE, self._outbox.next(wait=False)))
            while (message := self._outbox.next()) is not None:
                link.send(pack(MESSAGE, message))
            link.send(Frame(STOP))
            return
        self._outbox.close(lost=True)

    def _receive_all(self, link: Link) -> None:
        with contextlib.suppress(RuntimeError):
            while True:
                self._outbox.acknowledge(link.receive().content())
        self._outbox.close(lost=True)


def joined(address: Address) -> Inbox:
    """Waits for the sender, and returns the receiver's end of a channel."""
    link = address.link(1)

    def acknowledge(count: int) -> None:
        # A sender that has ended needs no acknowledgement.
        with contextlib.suppress(RuntimeError):
            link.send(pack(MESSAGE, count))

    def receive_all() -> None:
        with contextlib.suppress(RuntimeError):
            while (packed := link.receive()).verb != STOP:
                inbox.put(packed.content())
        inbox.end()

    inbox = Inbox(link.receive().content(), acknowledge)
    threading.Thread(target=receive_all, daemon=True).start()
    return inbox
