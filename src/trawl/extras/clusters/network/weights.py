"""Schemes that send weights over a network, and their channels."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from trawl.extras.clusters.launching.authentication import KEY_BYTES, AuthenticationError, Session
from trawl.extras.clusters.network.control import Rendezvous, WorkerConnection
from trawl.extras.clusters.network.frames import MESSAGE, STOP, Frame, pack
from trawl.extras.clusters.network.link import check_name
from trawl.extras.clusters.network.listener import Listener
from trawl.weights.groups import entry_of
from trawl.weights.message_schemes import MessageWeightSyncScheme
from trawl.weights.messages import Inbox, MessageChannel, Outbox, WeightMessage
from trawl.weights.scheme import TransportBackend

# Seconds that a sender waits at shutdown until the last weights have been sent.
_LAST = 5.0


class NetworkWeightSyncScheme(MessageWeightSyncScheme):
    """Base class of schemes that, without a collector, have a connection to each receiver.

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.
    """

    def __init__(self, strategy: str = "tensordict") -> None:
        super().__init__(strategy)
        # Address at which each receiver connects to the sender.
        self._addresses: dict[int, Rendezvous] = {}
        self._listener: Listener | None = None

    @abstractmethod
    def _meeting(self) -> tuple[str, int, float]:
        """Returns the sender's host and port, and the timeout for connecting."""

    @override
    def _new_channels(self, workers: Sequence[int]) -> dict[int, MessageChannel]:
        host, port, timeout = self._meeting()
        self._listener = listener = Listener(host, port)
        self._addresses = {
            i: Rendezvous(host, listener.port, f"weights of {i}", os.urandom(KEY_BYTES), timeout)
            for i in workers
        }
        return {i: NetworkChannel(i, at, listener) for i, at in self._addresses.items()}

    @override
    def _join(self, worker: int) -> Inbox:
        return joined(entry_of(self._addresses, worker))

    @override
    def shutdown(self) -> None:
        super().shutdown()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_listener": None}


class DistributedWeightSyncScheme(NetworkWeightSyncScheme):
    """Sends weights over a network.

    With a collector, weights travel over its connections to its ranks. Without a collector, the
    scheme has a connection to each receiver, in any process on any machine.

    Args:
        backend: accepted for compatibility; only ``"gloo"`` can be used.
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

    transport = "trawl.extras.clusters.compat.network_transports:DistributedTransport"

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


class NetworkChannel(MessageChannel):
    """Channel over a connection between the sender and one receiver.

    Args:
        number: number of the receiver, for error messages.
        address: address at which the receiver connects.
        listener: the listener at that address.
    """

    def __init__(self, number: int, address: Rendezvous, listener: Listener) -> None:
        self._address = address
        self._listener = listener
        self._outbox = Outbox(number)
        # The receiver's connection; None if the sender ends first.
        self._joined: queue.SimpleQueue[WorkerConnection | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        listener.expect(address.name, address.key, partial(_admit, self._joined))

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
        self._listener.forget(self._address.name)
        self._outbox.close()
        self._joined.put(None)
        if self._thread.is_alive():
            self._thread.join(_LAST)
        # A receiver may have joined too late, or before this channel was connected.
        with contextlib.suppress(queue.Empty):
            while True:
                if (connection := self._joined.get_nowait()) is not None:
                    connection.close()

    def _send_all(self) -> None:
        # If the receiver does not join, or is gone, the last line ends all waits for the receiver.
        with contextlib.suppress(queue.Empty, RuntimeError):
            connection = self._joined.get(timeout=self._address.timeout)
            if connection is not None:
                threading.Thread(target=self._receive_all, args=(connection,), daemon=True).start()
                # The receiver expects this first message at once: earlier weights, or None.
                connection.send(pack(MESSAGE, self._outbox.next(wait=False)))
                while (message := self._outbox.next()) is not None:
                    connection.send(pack(MESSAGE, message))
                connection.send(Frame(STOP))
                return
        self._outbox.close(lost=True)

    def _receive_all(self, connection: WorkerConnection) -> None:
        with contextlib.suppress(EOFError, AuthenticationError):
            while True:
                self._outbox.acknowledge(connection.next().content())
        self._outbox.close(lost=True)
        connection.hang_up()
        connection.close()


def _admit(
    joined: queue.SimpleQueue[WorkerConnection | None], end: socket.socket, session: Session
) -> None:
    """Takes over the connection of a receiver."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    joined.put(WorkerConnection(end, session))


def joined(address: Rendezvous) -> Inbox:
    """Waits for the sender, and returns the receiver's end of a channel.

    Raises:
        OSError: if the sender has ended, or does not connect its end in time.
    """
    connection = address.connect("{}")

    def acknowledge(count: int) -> None:
        # A sender that has ended needs no acknowledgement.
        with contextlib.suppress(RuntimeError):
            connection.send(pack(MESSAGE, count))

    def receive_all() -> None:
        with contextlib.suppress(EOFError, AuthenticationError):
            while (packed := connection.next()).verb != STOP:
                inbox.put(packed.content())
        inbox.end()
        connection.close()

    first = select.poll()
    first.register(connection.fileno(), select.POLLIN)
    if not first.poll(address.timeout * 1000):
        connection.close()
        raise TimeoutError(f"the sender of weights did not connect within {address.timeout:g} s")
    inbox = Inbox(connection.next().content(), acknowledge)
    threading.Thread(target=receive_all, daemon=True).start()
    return inbox
