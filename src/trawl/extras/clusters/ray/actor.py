"""Code that runs in the Ray actor of a worker.

A thread of the actor runs the worker. If the actor can connect to the driver, this thread itself
reads small messages from the connection. All other messages arrive as calls of the actor's methods,
which run in Ray's threads. The driver also calls a method to fetch the messages of the worker.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from typing_extensions import override

from trawl.backends.base import HandleCall, Port, Service
from trawl.backends.failure import Failure
from trawl.backends.processes.loop import NOTHING, Breaker, Stopped, ThreadBreaker, WorkerLoop
from trawl.extras.clusters.launching.authentication import AuthenticationError
from trawl.extras.clusters.network.control import Rendezvous, WorkerConnection
from trawl.extras.clusters.network.frames import Delivery, Frame, pack_for_ray, read_delivery

# Number of the backend's calls that an actor may run at a time: one call fetches messages, and the
# others deliver messages.
CONCURRENCY = 8
# Seconds after which a thread yields to other threads that wait. A service may work without a
# pause, and calls of the actor's methods should not wait long for the service.
_TURN = 0.001
_ENDED = (
    "this worker has ended: the collector's remote_collectors has the handles of the workers "
    "that are alive"
)
# Seconds for which an actor's connection may fail to reach the driver. Then the actor ends, even if
# Ray can still reach the driver.
_OUT_OF_REACH = 60.0


class Hello(NamedTuple):
    """First message of an actor.

    Attributes:
        pid: id of the actor's process.
        node: id of the actor's node.
        connected: True if the actor has a connection to the driver.
    """

    pid: int
    node: str
    connected: bool


class End(NamedTuple):
    """Last message of an actor: its service has ended.

    Attributes:
        failure: the exception that ended the service, or None.
    """

    failure: Failure | None


class Unasked(NamedTuple):
    """Message that a service sends during a call of its handle. It answers no request."""

    frame: Frame


class Barrier(NamedTuple):
    """Message that holds back later messages.

    The later messages wait until :meth:`RayActor.backend_mark` is called with this number.
    """

    number: int


class RayActor:
    """Actor in which a worker runs.

    Args:
        make: the packed function that makes the service.
        path: ``sys.path`` of the driver, whose modules may exist on this machine, too.
        rendezvous: the address for the connection to the driver; None for no connection.
    """

    # Methods that the backend calls. They may wait for each other, or for the service. Their prefix
    # keeps them apart from the methods of a user's collector, which the handle also has.
    of_backend = ("backend_deliver", "backend_exchange", "backend_interrupt", "backend_stop")

    def __init__(self, make: Frame, path: Sequence[str], rendezvous: Rendezvous | None) -> None:
        import ray

        sys.setswitchinterval(_TURN)
        sys.path += [entry for entry in path if entry not in sys.path]
        requests: WorkerConnection | None = None
        with contextlib.suppress(OSError, AuthenticationError):
            requests = None if rendezvous is None else rendezvous.connect()
        if requests is not None:
            requests.keep_alive(_OUT_OF_REACH)
        work = threading.Thread(target=self._work, name="trawl-worker", daemon=True)
        self._loop = _RayLoop(make, requests, ThreadBreaker(work))
        node = ray.get_runtime_context().get_node_id()
        self._loop.put(Hello(os.getpid(), node, requests is not None))
        self._ended = threading.Event()
        work.start()

    def _work(self) -> None:
        failure = self._loop.run()
        self._loop.refuse_calls()
        self._ended.set()
        self._loop.put(End(failure))

    def backend_exchange(self, packed: bytes, *beside: Any) -> list[Any]:
        """Delivers messages to the service, waits for messages that it sends, and returns them.

        Args:
            packed: the bytes that :meth:`Delivery.packed` returned.
            *beside: the memory and references that :meth:`Delivery.packed` returned.
        """
        self._loop.deliver(packed, beside)
        return self._loop.take_sent()

    def backend_deliver(self, packed: bytes, *beside: Any) -> None:
        """Delivers messages. The arguments are those of :meth:`backend_exchange`."""
        self._loop.deliver(packed, beside)

    def backend_interrupt(self, interruption: tuple[int, int]) -> None:
        """Delivers an interruption."""
        self._loop.interrupt(interruption)

    def backend_stop(self) -> None:
        """Ends the service."""
        self._loop.stop()

    def backend_mark(self, number: int) -> None:
        """Records that all earlier calls of the same caller have been carried out."""
        self._loop.mark(number)

    def backend_ask(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls a service method between two pieces of the service's work; returns the result."""
        asked = HandleCall(name, args, kwargs, Future())
        self._loop.ask(asked)
        return pickle.loads(asked.answer.result())

    def backend_end(self) -> None:
        """Ends the service, and waits until it has ended."""
        self.backend_stop()
        self._ended.wait()


class _RayLoop(WorkerLoop):
    """Loop of a worker in an actor, with queues of its messages.

    The inbox contains received messages that are not handled yet. The outbox contains messages to
    the driver that no call has fetched yet.

    Args:
        make: the packed function that makes the service.
        requests: the connection to the driver, or None.
        breaker: object that aborts the work of the thread in which the loop runs.
    """

    def __init__(self, make: Frame, requests: WorkerConnection | None, breaker: Breaker) -> None:
        super().__init__(breaker)
        self._make = make
        # True while the service carries out a call of its handle.
        self._answering = False
        self._lock = threading.Lock()
        # Wakes waiting calls when there is something in the outbox.
        self._outbox_filled = threading.Condition(self._lock)
        self._early: dict[int, list[Frame]] = {}
        self._delivered = 0
        self._inbox: deque[Frame] = deque()
        self._outbox: list[Any] = []
        # Calls of handles. None once the service has ended and can't answer them.
        self._asked: deque[HandleCall] | None = deque()
        # Messages wait while the barrier is above the mark.
        self._barrier = self._marked = 0
        self._sent = self._received = 0
        self._interruption = (0, 0)
        self._requests = requests
        # True once something has come over the connection.
        self._connected = False
        # The service's thread waits for the connection, and for this pipe, to which calls write.
        self._rung, self._bell = os.pipe()
        self._poll = select.poll()
        for fd in (self._rung, *([requests.fileno()] if requests is not None else [])):
            self._poll.register(fd, select.POLLIN)

    # --- for calls

    def deliver(self, packed: bytes, beside: Sequence[Any]) -> None:
        """Puts the messages that a call has brought into the inbox."""
        self._accept(*read_delivery(packed, beside))
        self._ring()

    def take_sent(self) -> list[Any]:
        """Waits for messages that the service sends, and returns them."""
        with self._outbox_filled:
            self._outbox_filled.wait_for(lambda: self._outbox)
            taken, self._outbox = self._outbox, []
            return taken

    def interrupt(self, interruption: tuple[int, int]) -> None:
        """Records an interruption."""
        with self._lock:
            self._interrupted(interruption)

    def ask(self, asked: HandleCall) -> None:
        """Queues a call of the handle."""
        with self._lock:
            if self._asked is None:
                raise RuntimeError(_ENDED)
            self._asked.append(asked)
        self._ring()

    def mark(self, number: int) -> None:
        """Records that all calls before this mark have been carried out."""
        self._marked = number
        self._ring()

    def stop(self) -> None:
        """Ends the service, and aborts its work."""
        self._breaker.stop()
        self._ring()

    def _ring(self) -> None:
        os.write(self._bell, b"!")

    def _accept(self, delivery: Delivery, messages: list[Frame]) -> None:
        """Handles a delivery. Deliveries with messages may arrive in any order."""
        with self._lock:
            self._interrupted(delivery.interruption)
            if delivery.heard is not None:
                self._received = max(self._received, delivery.heard)
            if messages:
                self._early[delivery.number] = messages
            while self._delivered in self._early:
                self._inbox += self._early.pop(self._delivered)
                self._delivered += 1

    def _interrupted(self, interruption: tuple[int, int]) -> None:
        if interruption[1] > self._interruption[1]:
            self._interruption = interruption

    # --- for the service's thread

    def put(self, thing: Any) -> None:
        """Adds a message to the outbox."""
        with self._outbox_filled:
            self._outbox.append(thing)
            self._sent += 1
            self._outbox_filled.notify()

    @override
    def next_message(self, wait: bool) -> Any:
        self._read(wait=False)
        while not self._breaker.stopping:
            with self._lock:
                # A call is answered even if the driver has not received everything yet.
                self._answering = bool(self._asked)
                if self._asked:
                    return self._asked.popleft()
                # The driver must have received all messages of this actor before the actor handles
                # the next message. Otherwise, messages would be lost if handling it ended this
                # process.
                free = self._received == self._sent and self._barrier <= self._marked
                found = self._inbox.popleft() if free and self._inbox else None
            if found is not None:
                content = found.content()
                if not isinstance(content, Barrier):
                    return content
                self._barrier = content.number
            elif free and not wait:
                return NOTHING
            else:
                self._read(wait=True)
        raise Stopped

    def refuse_calls(self) -> None:
        """Refuses all waiting calls of the handle, and all later ones."""
        with self._lock:
            left, self._asked = self._asked or (), None
        for asked in left:
            asked.answer.set_exception(RuntimeError(_ENDED))

    def _do_without(self, fd: int) -> None:
        """Handles the loss of the connection to the driver."""
        if self._connected:
            # The driver can't send this worker requests any more, so another worker has to replace
            # this one.
            os.kill(os.getpid(), signal.SIGKILL)
        # The driver has not used the connection, and sends all messages by calls.
        self._poll.unregister(fd)

    def _read(self, wait: bool) -> None:
        """Handles messages that arrive over the connection."""
        while found := self._poll.poll(None if wait else 0):
            wait = False
            for fd, _ in found:
                if fd == self._rung:
                    os.read(fd, 1 << 10)
                elif self._requests is not None:
                    try:
                        self._accept(*read_delivery(self._requests.next().body, ()))
                        self._connected = True
                    except EOFError:
                        self._do_without(fd)

    @override
    def make_service(self) -> Service:
        make: Callable[[Port], Service] = self._make.content()
        return make(self)

    @override
    def send(self, content: Any) -> None:
        frame = pack_for_ray(content)
        # Only messages from the service's thread can belong to a call of the handle.
        if self._breaker.is_current:
            with self._breaker.shielded():
                self.put(Unasked(frame) if self._answering else frame)
        else:
            self.put(frame)

    @override
    def interrupted(self) -> int:
        return self._interruption[0]
