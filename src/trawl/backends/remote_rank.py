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
from typing import Any, NoReturn

from typing_extensions import override

from trawl.backends.base import Port, Service
from trawl.backends.failure import Failure
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

# Seconds that a worker whose driver is gone may take to close its environments, and that a worker
# that has ended waits for its driver to close the connection.
_CLOSING = 5.0


# Name in the store of the address at which a rank connects for its orders.
ORDERS = "orders"

# The work of a rank, given the address where it meets the driver, and the connection for orders.
Task = Callable[[Address, Orders], int]


class Stopped(BaseException):
    """Raised in a worker that is to end."""


class Rank(Port):
    """Worker's end of its connection to the driver, for any transport.

    A subclass sends messages (:meth:`transmit`), and passes received ones to :meth:`receive`, from
    a thread of its own: therefore a worker can be stopped while it works. All other orders are read
    by the thread that works, when it has time for them.

    Args:
        orders: the connection for orders; this object closes it.
        lifeline: the connection that detects an unreachable driver, or None.
    """

    def __init__(self, orders: Orders, lifeline: Lifeline | None = None) -> None:
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
        self._sending = self._late = self._over = False

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
        os.kill(os.getpid(), signal.SIGTERM)

    # --- in the thread that works

    @override
    def send(self, content: Any) -> None:
        self._tell(pack(MESSAGE, content))

    def _tell(self, packed: Packed) -> None:
        if threading.current_thread() is threading.main_thread():
            self._unbroken(self._transmit, packed)
            return
        # This is a thread of an environment, where `Stopped` must not be raised.
        with contextlib.suppress(RuntimeError):
            self._transmit(packed)

    def _transmit(self, packed: Packed) -> None:
        with self._talking:
            self._sent += 1
            self.transmit(packed)

    def _secure(self) -> None:
        with self._talking:
            self.secure()

    def _unbroken(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function that must not be broken off.

        The rest of half a message would be taken from the next one. And a question of the driver
        that was taken from its queue, but not kept, would be waited for again.
        """
        self._sending = True
        try:
            function(*arguments)
        except RuntimeError:
            raise Stopped from None
        finally:
            self._sending = False
        if self._late:
            self._stop()

    def _stop(self) -> NoReturn:
        self._late = False
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Stopped

    def _told_to_stop(self, signum: int, frame: Any) -> None:
        if self._sending:
            self._late = True
        else:
            self._stop()

    @override
    def memory(self, name: int) -> Any:
        raise KeyError(name)

    @override
    def interrupted(self) -> int:
        return self._interruption[0]

    def live(self) -> int:
        """Runs the worker; returns its exit status."""
        status = 0
        with _stoppable(self._told_to_stop):
            try:
                if self._lifeline is not None:
                    self._lifeline.watch(self.lose)
                self.begin()
                self._work()
            except Stopped:
                pass
            except BaseException as error:
                status = 1
                with contextlib.suppress(Stopped):
                    self._tell(pack(FAILED, Failure.of(error)))
            with contextlib.suppress(Stopped):
                self._tell(pack(ENDED, status))
            # From here on, requests to stop must not reach the program that this rank is part of.
            with contextlib.suppress(Stopped), self._losing:
                self._over = True
            if self._last is not None:
                self._last.cancel()
        # Waits until the driver closes the connection.
        self._lost.wait(_CLOSING)
        self._orders.close()
        return status

    def _work(self) -> None:
        path, make = self._next()
        sys.path += [entry for entry in path if entry not in sys.path]
        service: Service = pickle.loads(make)(self)
        try:
            try:
                while True:
                    while not service.busy or self._orders.waiting:
                        content = self._next()
                        self._make_sure()
                        service.handle(content)
                    self._make_sure()
                    service.work()
            finally:
                # Closing the service must not be broken off. This line may be, but only once.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        finally:
            service.close()

    def _next(self) -> Any:
        try:
            content, interruption, self._heard = self._orders.next().content()
        except EOFError:
            raise Stopped from None
        self._interrupt(interruption)
        return content

    def _make_sure(self) -> None:
        """Makes sure that no sent message is lost if the next step ends this process."""
        if self._heard < self._sent:
            self._unbroken(self._secure)


@contextmanager
def _stoppable(stop: Callable[[int, Any], None]) -> Iterator[None]:
    """Context within which SIGTERM calls ``stop`` in the main thread."""
    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:
        raise RuntimeError(
            "a rank must run in the main thread of its process: signals end what it does"
        ) from None
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave(status: int) -> None:
    """Ends this process at once, after flushing its output."""
    for stream in (sys.stdout, sys.stderr):
        # The stream may be closed, or nobody may read it any more.
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


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
