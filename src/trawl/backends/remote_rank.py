"""Code that runs in a worker that is reached over a network."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from trawl.backends.base import Service
from trawl.backends.lifeline import Lifeline
from trawl.backends.link import Address
from trawl.backends.order_line import Meeting, Orders
from trawl.backends.remote_packing import (
    ENDED,
    FAILED,
    INTERRUPT,
    KILL,
    MESSAGE,
    STOP,
    Packed,
    pack,
)
from trawl.backends.worker_loop import NOTHING, Breaker, Stopped, WorkerLoop

# Seconds that a worker whose driver is gone may take to close its environments, and that a worker
# that has ended waits for its driver to close the connection.
_CLOSING = 5.0


# Name in the store of the address at which a rank connects for its orders.
ORDERS = "orders"

# The work of a rank, given the address where it meets the driver, and the connection for orders.
Task = Callable[[Address, Orders], int]


class Rank(WorkerLoop):
    """Worker's end of its connection to the driver, for any transport.

    A subclass sends messages (:meth:`transmit`), and passes received ones to :meth:`receive`, from
    a thread of its own: therefore a worker can be stopped while it works. All other orders are read
    by the thread that works, when it has time for them.

    Args:
        orders: the connection for orders; this object closes it.
        lifeline: the connection that detects an unreachable driver, or None.
    """

    def __init__(self, orders: Orders, lifeline: Lifeline | None = None) -> None:
        super().__init__(Breaker())
        self._orders = orders
        self._lifeline = lifeline
        self._interruption = 0, 0
        # How many messages were sent, and how many of them the driver has confirmed.
        self._sent = self._heard = 0
        self._losing, self._interrupting = threading.Lock(), threading.Lock()
        # Any thread of an environment may warn, and the worker sends that to the driver.
        self._talking = threading.Lock()
        self._lost = threading.Event()
        self._last: threading.Timer | None = None
        self._over = False

    @abstractmethod
    def begin(self) -> None:
        """Begins to listen to the driver."""

    @abstractmethod
    def transmit(self, packed: Packed) -> None:
        """Sends a message, and returns once memory that it refers to may change.

        Raises:
            RuntimeError: if the driver is gone.
        """

    def secure(self) -> None:
        """Waits until all sent messages are sure to arrive, whatever happens to this process.

        Raises:
            RuntimeError: if the driver is gone.
        """

    # --- in the thread that listens

    def receive(self, packed: Packed) -> None:
        """Handles a message that came while the worker may be working."""
        if packed.verb == INTERRUPT:
            self._interrupt(packed.content())
        elif packed.verb == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif packed.verb == STOP:
            with self._losing:
                if not self._over:
                    self._break_off()

    def _interrupt(self, interruption: tuple[int, int]) -> None:
        # Interruptions come over two connections.
        with self._interrupting:
            if interruption[1] > self._interruption[1]:
                self._interruption = interruption

    def lose(self) -> None:
        """Ends this worker, as the driver is gone or has closed the connection.

        More than one thread may call it.
        """
        with self._losing:
            again = self._lost.is_set()
            self._lost.set()
            if again or self._over:
                return
            self._last = threading.Timer(_CLOSING, os.kill, (os.getpid(), signal.SIGKILL))
            self._last.daemon = True
            self._last.start()
            self._break_off()

    def _break_off(self) -> None:
        # The signal breaks off the current work, unless code there catches its exception.
        self._orders.ring()
        self._breaker.stop()

    # --- in the thread that works

    @override
    def send(self, content: Any) -> None:
        self._tell(pack(MESSAGE, content))

    def _tell(self, packed: Packed) -> None:
        if not self._breaker.is_current:
            # This is a thread of an environment, where `Stopped` must not be raised.
            with contextlib.suppress(RuntimeError):
                self._transmit(packed)
            return
        # The rest of half a message would be taken from the next one.
        with self._breaker.shielded(), _stopped_by_loss():
            self._transmit(packed)

    def _transmit(self, packed: Packed) -> None:
        with self._talking:
            self._sent += 1
            self.transmit(packed)

    @override
    def memory(self, name: int) -> Any:
        raise KeyError(name)

    @override
    def interrupted(self) -> int:
        return self._interruption[0]

    def live(self) -> int:
        """Runs the worker; returns its exit status."""
        with self.stoppable():
            if self._lifeline is not None:
                self._lifeline.watch(self.lose)
            self.begin()
            failure = self.run()
            status = 0 if failure is None else 1
            with contextlib.suppress(Stopped):
                if failure is not None:
                    self._tell(pack(FAILED, failure))
                self._tell(pack(ENDED, status))
            with self._losing:
                # From here on, requests to stop must not reach the program of this rank.
                self._over = True
            if self._last is not None:
                self._last.cancel()
        # Waits until the driver closes the connection.
        self._lost.wait(_CLOSING)
        self._orders.close()
        return status

    @override
    def make_service(self) -> Service:
        path, make = self._read()
        sys.path += [entry for entry in path if entry not in sys.path]
        service: Service = pickle.loads(make)(self)
        return service

    @override
    def next_message(self, wait: bool) -> Any:
        content = self._read() if wait or self._orders.waiting else NOTHING
        if self._heard < self._sent:
            # No sent message may be lost if the next step ends this process.
            with _stopped_by_loss(), self._talking:
                self.secure()
        return content

    def _read(self) -> Any:
        try:
            content, interruption, self._heard = self._orders.next().content()
        except EOFError:
            raise Stopped from None
        self._interrupt(interruption)
        return content


@contextmanager
def _stopped_by_loss() -> Iterator[None]:
    """Context that raises ``Stopped`` if the driver is gone."""
    try:
        yield
    except RuntimeError:
        raise Stopped from None


def run_rank_at(address: Address) -> int:
    """Joins the driver that waits at an address, and works for it; returns the exit status."""
    # The store is not trusted: the process at this address must prove that it knows the key.
    host, port = address.names().get(ORDERS).decode().rsplit(" ", 1)
    meeting = Meeting(host, int(port), address.prefix, address.key, address.timeout)
    orders = meeting.connect()
    try:
        task: Task = orders.next().content()
    except EOFError:
        raise RuntimeError(f"the driver at {host}:{port} is gone") from None
    return task(address, orders)
