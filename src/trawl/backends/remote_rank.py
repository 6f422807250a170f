"""A worker that is reached over a network: what runs there."""

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
from trawl.backends.order_line import Orders
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

# Seconds in which a worker whose driver is gone may close its environments; and in which a driver
# is to let go of a worker that has ended.
_CLOSING = 5.0


class Stopped(BaseException):
    """The worker is to end."""


class Rank(Port):
    """A worker's end of its connection, by whatever that is made.

    A subclass sends (:meth:`transmit`), and gives what comes to :meth:`receive`, from a thread of
    its own: so an order to stop is heard while the worker works. All other orders are read by the
    thread that works, when it has time for them.

    Args:
        orders: where these come from; this object closes it.
        lifeline: what tells that the driver is out of reach, if that has to be told.
    """

    def __init__(self, orders: Orders, lifeline: Lifeline | None = None) -> None:
        self._orders = orders
        self._lifeline = lifeline
        self._interruption = 0, 0
        # How many messages were sent, and how many of them the driver is known to have.
        self._sent = self._heard = 0
        self._losing, self._interrupting = threading.Lock(), threading.Lock()
        # Any thread of an environment may warn, and the worker tells of it.
        self._talking = threading.Lock()
        self._lost = threading.Event()
        self._last: threading.Timer | None = None
        self._sending = self._late = self._over = False

    @abstractmethod
    def begin(self) -> None:
        """Begins to listen."""

    @abstractmethod
    def transmit(self, packed: Packed) -> None:
        """Sends a message, and waits until what it refers to may change.

        Raises:
            RuntimeError: if nobody is there to take it.
        """

    def secure(self) -> None:
        """Waits until what was sent comes, whatever becomes of this process.

        Raises:
            RuntimeError: if nobody is there to take it.
        """

    # --- in the thread that listens

    def receive(self, packed: Packed) -> None:
        """Takes in a message."""
        if packed.verb == INTERRUPT:
            self._interrupt(packed.content())
        elif packed.verb == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif packed.verb == STOP:
            with self._losing:
                if not self._over:
                    self._break_off()

    def _interrupt(self, interruption: tuple[int, int]) -> None:
        # They come on two ways.
        with self._interrupting:
            if interruption[1] > self._interruption[1]:
                self._interruption = interruption

    def lose(self) -> None:
        """The driver is gone, or has closed the connection: nobody needs this worker any more.

        More than one thread may notice it.
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
        # The signal breaks off what is done now, but may be caught by it.
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
        # A thread of an environment; nobody is to be stopped in it.
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
        """Calls a function that is not to be broken off.

        Half a message would be taken for half of the next one, and a question that was taken and
        not kept would be waited for again.
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
        """Lives the life of a worker; gives its exit status."""
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
            # What comes now is no matter of the program that this rank is a part of.
            with contextlib.suppress(Stopped), self._losing:
                self._over = True
            if self._last is not None:
                self._last.cancel()
        # Its end is that the driver lets go.
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
                # What closes the service is not to be broken off, and this line may be: once.
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
        """What was said is not to be lost, if what is done next is the end of this process."""
        if self._heard < self._sent:
            self._unbroken(self._secure)


@contextmanager
def _stoppable(stop: Callable[[int, Any], None]) -> Iterator[None]:
    """Within it a signal ends what the main thread does, once."""
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
    """Ends this process at once, but for what it has printed."""
    for stream in (sys.stdout, sys.stderr):
        # It may be closed, or nobody reads it any more.
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
