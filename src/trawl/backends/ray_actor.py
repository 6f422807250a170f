"""A worker in a Ray actor: what runs there.

A thread of the actor lives the life of the worker. What is small it reads itself, from a line of
its own to the driver, if there is a way to that. Calls of the actor's methods, in threads of Ray's,
bring it all other messages, and take away what it says.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from typing_extensions import override

from trawl.backends.authentication import AuthenticationError
from trawl.backends.base import Asked, Port, Service
from trawl.backends.failure import Failure
from trawl.backends.order_line import Meeting, Orders
from trawl.backends.ray_wire import Letter, Packed, pack, read_letter, unpack
from trawl.lean import import_lean

# Calls that an actor carries out at a time: one that waits for something to take, and messages.
CONCURRENCY = 8
# Seconds that a thread works while others wait. A service may work without a pause, and calls of
# the actor's methods should not wait long for it.
_TURN = 0.001
_ENDED = (
    "this worker has ended: the collector's remote_collectors has the handles of those that live"
)
# Seconds after which it ends if the driver is out of reach of its line. Ray may still reach it.
_OUT_OF_REACH = 60.0


class Hello(NamedTuple):
    """The first thing an actor says.

    Attributes:
        pid: its process.
        node: the id of the node that it is on.
        lined: whether it has a line to the driver.
    """

    pid: int
    node: str
    lined: bool


class End(NamedTuple):
    """The last thing an actor says: its service has ended.

    Attributes:
        failure: the exception that it ended by, or None.
    """

    failure: Failure | None


class Unasked(NamedTuple):
    """A message that a service sends because of a call of its handle: the driver expects none."""

    packed: Packed


class Barrier(NamedTuple):
    """A message: what follows has to wait until the actor is marked with this number."""

    number: int


class _Stop(BaseException):
    """The worker was told to end."""


class RayActor:
    """The actor.

    Args:
        make: what makes the service, pickled.
        refs: the references to objects in it.
        path: where modules are found on the other side; they may be there, too.
        meeting: where the line to the driver leads to; None if there is none.
    """

    # Methods that the backend calls. They may wait for each other, or for the service. Their names
    # begin as no method of a user's collector does, which the handle has beside them.
    of_backend = ("backend_deliver", "backend_exchange", "backend_interrupt", "backend_stop")

    def __init__(
        self, make: bytes, refs: list[Any], path: Sequence[str], meeting: Meeting | None
    ) -> None:
        import ray

        sys.setswitchinterval(_TURN)
        sys.path += [entry for entry in path if entry not in sys.path]
        orders: Orders | None = None
        with contextlib.suppress(OSError, AuthenticationError):
            orders = None if meeting is None else meeting.connect()
        if orders is not None:
            orders.ask_now_and_then(_OUT_OF_REACH)
        self._mail = _Mail(orders)
        node = ray.get_runtime_context().get_node_id()
        self._mail.say(Hello(os.getpid(), node, orders is not None))
        self._life = _Life(self._mail, (make, [], refs))

    def backend_exchange(self, letter: bytes, *beside: Any) -> list[Any]:
        """Brings messages; gives what the service said since the last call, once there is any.

        Args:
            letter: what :meth:`Letter.packed` has made.
            *beside: the same.
        """
        self._mail.deliver(*read_letter(letter, beside))
        return self._mail.said()

    def backend_deliver(self, letter: bytes, *beside: Any) -> None:
        """Brings messages; for the arguments see :meth:`backend_exchange`."""
        self._mail.deliver(*read_letter(letter, beside))

    def backend_interrupt(self, interruption: tuple[int, int]) -> None:
        """Brings an interruption."""
        self._mail.interrupt(interruption)

    def backend_stop(self) -> None:
        """Ends the service."""
        self._life.stop()

    def backend_mark(self, number: int) -> None:
        """Notes that all calls which the same caller made before have been carried out."""
        self._mail.mark(number)

    def backend_ask(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the service, between two pieces of its work, and waits for it."""
        asked = Asked(name, args, kwargs, Future())
        self._mail.ask(asked)
        return pickle.loads(asked.answer.result())

    def backend_end(self) -> None:
        """Ends the service, and waits until that is done."""
        self._life.stop()
        self._life.ended.wait()


class _Mail:
    """What came and was not handled, what was said and not taken.

    Args:
        orders: the line to the driver, if there is one.
    """

    def __init__(self, orders: Orders | None) -> None:
        self._lock = threading.Lock()
        # For calls, when something was said.
        self._spoke = threading.Condition(self._lock)
        self._early: dict[int, list[Packed]] = {}
        self._delivered = 0
        self._inbox: deque[Packed] = deque()
        self._outbox: list[Any] = []
        # Calls of handles. None: there is nobody to answer them any more.
        self._asked: deque[Asked] | None = deque()
        # Messages wait while the barrier is above the mark.
        self.barrier = self._marked = 0
        self._said = self._received = 0
        self.interruption = (0, 0)
        self.stopping = False
        self._orders = orders
        # Whether anything has come by the line.
        self._lined = False
        # The service's thread waits for the line, and for this, which calls ring.
        self._heard_bell, self._bell = os.pipe()
        self._poll = select.poll()
        for fd in (self._heard_bell, *([orders.fileno()] if orders is not None else [])):
            self._poll.register(fd, select.POLLIN)

    # --- for calls

    def deliver(self, letter: Letter, messages: list[Packed]) -> None:
        self._take(letter, messages)
        self._ring()

    def said(self) -> list[Any]:
        with self._spoke:
            self._spoke.wait_for(lambda: self._outbox)
            taken, self._outbox = self._outbox, []
            return taken

    def interrupt(self, interruption: tuple[int, int]) -> None:
        with self._lock:
            self._interrupted(interruption)

    def ask(self, asked: Asked) -> None:
        with self._lock:
            if self._asked is None:
                raise RuntimeError(_ENDED)
            self._asked.append(asked)
        self._ring()

    def mark(self, number: int) -> None:
        self._marked = number
        self._ring()

    def stop(self) -> None:
        self.stopping = True
        self._ring()

    def _ring(self) -> None:
        os.write(self._bell, b"!")

    def _take(self, letter: Letter, messages: list[Packed]) -> None:
        """Takes in a letter; those with messages may come in any order."""
        with self._lock:
            self._interrupted(letter.interruption)
            if letter.heard is not None:
                self._received = max(self._received, letter.heard)
            if messages:
                self._early[letter.number] = messages
            while self._delivered in self._early:
                self._inbox += self._early.pop(self._delivered)
                self._delivered += 1

    def _interrupted(self, interruption: tuple[int, int]) -> None:
        if interruption[1] > self.interruption[1]:
            self.interruption = interruption

    # --- for the service's thread

    def say(self, thing: Any) -> None:
        with self._spoke:
            self._outbox.append(thing)
            self._said += 1
            self._spoke.notify()

    def next(self, wait: bool) -> Packed | Asked | None:
        """The next message or call; None if there is none, and no time to wait for one."""
        self._read(wait=False)
        while not self.stopping:
            with self._lock:
                # It is answered whether or not the driver listens just now.
                if self._asked:
                    return self._asked.popleft()
                # What was said is on the other side before anything else is done: nothing of it
                # is lost if that is the end of this process.
                free = self._received == self._said and self.barrier <= self._marked
                if free and (self._inbox or not wait):
                    return self._inbox.popleft() if self._inbox else None
            self._read(wait=True)
        raise _Stop

    def end(self) -> None:
        """No calls are answered any more."""
        with self._lock:
            left, self._asked = self._asked or (), None
        for asked in left:
            asked.answer.set_exception(RuntimeError(_ENDED))

    def _do_without(self, fd: int) -> None:
        """The line is lost."""
        if self._lined:
            # Nobody could tell it anything: another is to take its place.
            os.kill(os.getpid(), signal.SIGKILL)
        # The driver never came to it, and knows that.
        self._poll.unregister(fd)

    def _read(self, wait: bool) -> None:
        """Takes in what comes by the line."""
        while found := self._poll.poll(None if wait else 0):
            wait = False
            for fd, _ in found:
                if fd == self._heard_bell:
                    os.read(fd, 1 << 10)
                elif self._orders is not None:
                    try:
                        self._take(*read_letter(self._orders.next().body, ()))
                        self._lined = True
                    except EOFError:
                        self._do_without(fd)


class _Life:
    """The thread in which the service lives.

    It is broken off only where the service is at work, by an exception that is raised there.

    Attributes:
        ended: set when the service is closed.
    """

    def __init__(self, mail: _Mail, make: Sequence[Any]) -> None:
        self._mail = mail
        self._make = make
        self._lock = threading.Lock()
        self._breakable = self._closing = self._undisturbed = self._answering = False
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trawl-worker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Breaks off what the service does."""
        with self._lock:
            again, self._mail.stopping = self._mail.stopping, True
            if self._breakable and not again:
                _raise_in(self._thread, _Stop)
        self._mail.stop()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Finishes what the service does within, also if it is to be broken off."""
        self._shield()
        self._undisturbed = True
        try:
            yield
        finally:
            self._undisturbed = False
            self._expose()

    @property
    def interrupted(self) -> int:
        """The number of the last interruption."""
        return self._mail.interruption[0]

    def say(self, thing: Any) -> None:
        """Says something for the service; that is not broken off."""
        self._shield()
        self._mail.say(Unasked(thing) if self._answering else thing)
        self._expose()

    def _run(self) -> None:
        failure = None
        try:
            self._work()
        except _Stop:
            pass
        except BaseException as error:
            failure = Failure.of(error)
        self._mail.end()
        self.ended.set()
        self._mail.say(End(failure))

    def _work(self) -> None:
        service: Service = self._breakably(self._made)
        try:
            while True:
                while (message := self._mail.next(wait=not service.busy)) is not None:
                    self._breakably(self._handle, service, message)
                self._answering = False
                self._breakably(service.work)
        finally:
            self._closing = True
            service.close()

    def _made(self) -> Service:
        import_lean()
        make: Callable[[Port], Service] = unpack(self._make)
        return make(_RayPort(self))

    def _handle(self, service: Service, message: Packed | Asked) -> None:
        self._answering = isinstance(message, Asked)
        content = message if isinstance(message, Asked) else unpack(message)
        if isinstance(content, Barrier):
            self._mail.barrier = content.number
        else:
            service.handle(content)

    def _breakably(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            self._expose()
            return function(*args)
        finally:
            self._shield()

    def _expose(self) -> None:
        with self._lock:
            if self._closing or self._undisturbed:
                return
            if self._mail.stopping:
                raise _Stop
            self._breakable = True

    def _shield(self) -> None:
        while True:
            try:
                with self._lock:
                    self._breakable = False
                    _raise_in(self._thread, None)
                return
            except _Stop:
                continue


def _raise_in(thread: threading.Thread, kind: type[BaseException] | None) -> None:
    """Raises an exception in another thread; None takes one back that was not raised yet."""
    what = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), what)


class _RayPort(Port):
    def __init__(self, life: _Life) -> None:
        self._life = life

    @override
    def send(self, content: Any) -> None:
        packed: Packed = pack(content)
        self._life.say(tuple(packed))

    @override
    def memory(self, name: int) -> Any:
        raise KeyError(name)

    @override
    def interrupted(self) -> int:
        return self._life.interrupted

    @override
    def undisturbed(self) -> AbstractContextManager[None]:
        return self._life.undisturbed()
