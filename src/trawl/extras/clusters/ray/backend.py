"""Workers in Ray actors, on any node of a cluster.

The driver calls an actor to fetch its next message, and the call returns when there is one. Small
requests use a control connection (:mod:`trawl.extras.clusters.network.control`), large ones go
through Ray; if the actor can't reach the driver, all do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

from trawl.backends.base import Death, Event, Failed, MakeService, Message, OwningBackend, Worker
from trawl.backends.failure import Failure
from trawl.backends.processes.payload import Package
from trawl.checks import require_linux
from trawl.extras.clusters.launching.authentication import KEY_BYTES
from trawl.extras.clusters.network.control import REQUESTS, ControlConnection
from trawl.extras.clusters.network.frames import (
    MESSAGE,
    Delivery,
    Frame,
    pack_code,
    pack_for_ray,
    package_for_ray,
)
from trawl.extras.clusters.network.listener import Listener
from trawl.extras.clusters.ray.actor import CONCURRENCY, Barrier, End, Hello, RayActor, Unasked
from trawl.extras.clusters.ray.cluster import Connection, Placement

# Maximum number of calls that may be delivering messages to an actor at a time. Messages that are
# sent meanwhile are sent together when one of these calls has returned.
_UNDER_WAY = 4
# If a worker of an ``in_step`` backend has sent nothing for this many seconds, the backend calls it
# just to fetch messages.
_SOON = 0.02
# Seconds that an actor may take to connect to the driver. After that, the connection is not used.
_LINING = 5.0
# Seconds to wait until killed actors are gone.
_DYING = 10.0


class RayBackend(OwningBackend):
    """Backend whose workers are actors of the Ray cluster that this process is connected to.

    Args:
        options: options of the actors for ``ray.remote`` (``num_cpus``, ``resources``, …): one
            mapping for all actors, or a list with a mapping for each index. The list may grow.
        patience: seconds that an actor may wait for its resources; None for no limit.
        in_step: True if a worker that has answered a message does nothing until the next message.
            The call that brings a message then also fetches its answer, so one call does the work
            of two.
        methods: names of the service's methods that holders of an actor's handle may call.

    Attributes:
        handles: the actors' handles by index. The list is kept up to date: when a worker is
            replaced, the new handle takes the position of the old one.
    """

    shares_memory = False
    _living: set[RayWorker]

    def __init__(
        self,
        options: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
        patience: float | None = 30.0,
        in_step: bool = False,
        methods: Sequence[str] = (),
    ) -> None:
        self._in_step = in_step
        self.handles: list[Any] = []
        self._methods = methods
        self._kind: Any = None
        self._connection = Connection()
        self._options = options
        self._patience = patience
        self._events: list[Event] = []
        self._received: deque[tuple[RayWorker, Any]] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._listener: Listener | None = None
        self._launches = itertools.count()
        # Last, because `__del__` must not do anything if this constructor has failed.
        require_linux("workers in other processes")
        super().__init__()

    def options(self, index: int) -> dict[str, Any]:
        """Returns the options of a worker's actor."""
        if isinstance(self._options, Mapping):
            return dict(self._options)
        return dict(self._options[index]) if index < len(self._options) else {}

    @override
    def launch(self, index: int, make: MakeService) -> RayWorker:
        self._check_open()
        self._connection.check()
        made = pack_code(make)
        # One thread carries out the calls of holders of a handle, in their order.
        own = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1}
        asked = self.options(index)
        place = Placement(asked, self._patience, [other.asked for other in self._unplaced()])
        requests = self._new_connection()
        rendezvous = None if requests is None else requests.rendezvous
        if self._kind is None:
            self._kind = actor_class(self._methods)
        kind = self._kind.options(**{**asked, **own})
        actor = kind.remote(made, list(sys.path), rendezvous)
        self.handles[index : index + 1] = [actor]
        worker = RayWorker(
            index, actor, self._connection, requests, asked, place, weakref.ref(self)
        )
        with self._changed:
            self._living.add(worker)
        worker.fetch()
        return worker

    def _new_connection(self) -> ControlConnection | None:
        """Returns the connection for small messages to the next worker; None if impossible."""
        import ray

        if self._listener is None:
            # The address that Ray has for this machine may belong to another machine, which
            # forwards connections.
            with contextlib.suppress(OSError):
                self._listener = Listener(ray.util.get_node_ip_address())
        if self._listener is None:
            return None
        name = f"worker {next(self._launches)}"
        return ControlConnection(self._listener, REQUESTS, name, os.urandom(KEY_BYTES), _LINING)

    def add_messages(self, worker: RayWorker, messages: list[Any]) -> None:
        """Queues messages of a worker, or the error that ended it; called from any thread."""
        with self._changed:
            self._received.extend((worker, thing) for thing in messages)
            self._changed.notify_all()
        if not self._closed and (not self._in_step or worker.owes):
            worker.fetch()

    @override
    def pack(self, parts: Sequence[Any], copied: Sequence[int] = ()) -> Package:
        return package_for_ray(parts, copied)

    @override
    def wait(self, timeout: float | None = None) -> list[Event]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._events:
            if not self._living and timeout is None:
                raise RuntimeError("there is no worker to wait for")
            if not self._received and not self._connection.alive:
                for worker in self._living:
                    worker.report_lost()
            over = self._await(deadline)
            with self._changed:
                came, self._received = self._received, deque()
            while came:
                self._read(*came.popleft())
            if over:
                break
        events, self._events = self._events, []
        return events

    def _await(self, deadline: float | None) -> bool:
        """Waits until a message has arrived or something is due; returns True if time is up."""
        due: Callable[[], None] | None = None
        with self._changed:
            while not self._received and due is None:
                now = time.monotonic()
                late = [] if self._closed else self._late()
                limits = [limit for limit in (deadline, *late) if limit is not None]
                # A worker that has answered will probably be called soon with its next request.
                idle = [one.received_at + _SOON for one in self._living if not one.fetching]
                if idle and (now >= min(idle) or len(idle) == len(self._living)):
                    due = self._fetch_all
                elif deadline is not None and now >= deadline:
                    return True
                elif late and now >= min(late):
                    due = self._check_resources
                else:
                    limits += idle
                    self._changed.wait(min(limits) - now if limits else None)
        # Ray is called without the lock, because one of its callbacks may be waiting for the lock.
        if due is not None:
            due()
        return deadline is not None and time.monotonic() >= deadline

    def _fetch_all(self) -> None:
        for worker in self._living:
            worker.fetch()

    def _unplaced(self) -> list[RayWorker]:
        return [worker for worker in self._living if worker.pid is None]

    def _late(self) -> list[float]:
        """Returns the times at which to check on actors that wait for a place."""
        return [one.place.late for one in self._unplaced() if one.place.late is not None]

    def _check_resources(self) -> None:
        """Checks on actors that have waited too long for a place.

        Raises:
            RuntimeError: if the cluster has no place for an actor. The error names the missing
                resources.
        """
        now = time.monotonic()
        for worker in sorted(self._unplaced(), key=lambda worker: worker.index):
            late = worker.place.late
            if late is not None and now >= late:
                worker.place.check(f"worker {worker.index}")

    def _read(self, worker: RayWorker, thing: Any) -> None:
        if worker not in self._living:
            return
        if isinstance(thing, Hello):
            worker.pid, worker.node, connected = thing
            worker.use_connection(connected)
        elif isinstance(thing, End):
            if thing.failure is not None:
                self._events.append(Failed(worker, thing.failure))
            status = 0 if thing.failure is None else 1
            self._remove(worker, f"exited with status {status}", expected=status == 0)
        elif isinstance(thing, BaseException):
            if worker.told_to_stop and worker.pid is None:
                self._remove(worker, "was stopped before it began", expected=True)
            else:
                self._remove(worker, worker.explain(thing), expected=False)
        elif not worker.unreadable:
            try:
                frame = thing.frame if isinstance(thing, Unasked) else thing
                self._events.append(Message(worker, frame.content()))
            except Exception as error:
                # The message can't be unpickled. Messages of other workers must not be lost.
                self._events.append(Failed(worker, Failure.of(error)))
                worker.unreadable = True
                worker.kill()

    def _remove(self, worker: RayWorker, reason: str, expected: bool) -> None:
        self._living.discard(worker)
        if self._connection.alive:
            worker.kill()
        worker.removed = True
        worker.close_connection()
        self._events.append(Death(worker, reason, expected))

    @override
    def _end(self, first: bool) -> None:
        deadline = time.monotonic() + _DYING
        with contextlib.suppress(RuntimeError):
            while self._living and time.monotonic() < deadline:
                self.wait(deadline - time.monotonic())
        for worker in self._living:
            worker.close_connection()
        self._living.clear()
        self._events.clear()
        self.handles.clear()
        self._close_listener()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def __del__(self) -> None:
        if self.__dict__.get("_owner") == os.getpid():
            for worker in self._living:
                worker.kill()
            self._close_listener()


class RayWorker(Worker):
    """Worker in a Ray actor.

    Attributes:
        actor: the handle of the actor.
        requests: the connection for small messages, used once the actor has connected; None if
            there can't be a connection.
        asked: the options with which the actor was requested.
        place: object that monitors the actor's wait for a place in the cluster.
        pid: id of the actor's process; None until the actor has begun.
        node: id of the actor's node; None until the actor has begun.
        fetching: True while a call to the actor for its next messages is under way, and after
            such a call has failed. While True, the actor is not called for messages.
        received_at: the time at which the last messages from the worker arrived.
        told_to_stop: True if :meth:`stop` was called.
        unreadable: True if the worker sent a message that can't be unpickled.
        removed: True if the worker's death was reported.
    """

    def __init__(
        self,
        index: int,
        actor: Any,
        connection: Connection,
        requests: ControlConnection | None,
        asked: Mapping[str, Any],
        place: Placement,
        backend: weakref.ref[RayBackend],
    ) -> None:
        self.index = index
        self.actor = actor
        self.requests = requests
        self.asked = asked
        self.place = place
        self.pid: int | None = None
        self.node: str | None = None
        self.told_to_stop = self.unreadable = self.removed = False
        self.fetching = self._killed = False
        self.received_at = time.monotonic()
        # Count of the worker's messages that have arrived, and of those that were confirmed over
        # the connection.
        self._heard = self._confirmed = 0
        self._connected = False
        self._barriers = 0
        # Count of messages to expect from the worker. The first two report that it has begun, and
        # that it is ready.
        self._expected = 2
        self._connection = connection
        self._backend = backend
        self._lock = threading.RLock()
        self._waiting: list[Frame] = []
        self._under_way = self._calls = 0
        self._interruption = (0, 0)

    @property
    def _reachable(self) -> bool:
        return not self.removed and not self._killed and self._connection.alive

    @override
    def send(self, content: Any) -> None:
        frame = pack_for_ray(content)
        if not self._reachable:
            return
        with self._lock:
            self._waiting.append(frame)
            self._expected += 1
        self._write()
        if not self._waiting:
            self.fetch()
        elif not self._exchange():
            self._deliver()

    def await_calls(self) -> None:
        """Holds back later messages to the worker until earlier calls of its handle are done."""
        if self._reachable:
            self._barriers += 1
            self.actor.backend_mark.remote(self._barriers)
            self.send(Barrier(self._barriers))

    def use_connection(self, connected: bool) -> None:
        """Begins to use the connection for small messages, or closes it if the actor has none."""
        if connected and self.requests is not None:
            with contextlib.suppress(OSError):
                self.requests.wait_connected()
                self._connected = True
        if not self._connected:
            self.close_connection()
        self._write()

    def close_connection(self) -> None:
        """Closes the connection for small messages."""
        if self.requests is not None:
            self.requests.close()

    def fetch(self) -> None:
        """Calls the actor to fetch its next messages, unless such a call is under way."""
        if not self.fetching and not self.removed and self._connection.alive:
            # The actor waits for this confirmation. A call would bring it later.
            if self._confirmed < self._heard:
                self._write()
            self._exchange()

    def _write(self) -> None:
        """Sends waiting messages over the connection, if any; large messages wait for a call."""
        if self.requests is None or not self._connected:
            return
        try:
            with self._lock:
                if any(frame.buffers or frame.refs for frame in self._waiting):
                    return
                self._confirmed = self._heard
                self.requests.send(Frame(MESSAGE, self._delivery(self._heard)[0]))
        except BaseException:
            # For the reason given in `_call`.
            self.kill()
            raise

    @property
    def owes(self) -> bool:
        """True if the worker has sent fewer messages than are expected."""
        return self._heard < self._expected

    # Ray is called without the lock, because one of its callbacks may be waiting for the lock.

    def _exchange(self) -> bool:
        """Calls the actor to deliver waiting messages and to fetch its next ones.

        Returns False, without a call, if such a call is under way.
        """
        with self._lock:
            if self.fetching:
                return False
            self.fetching = True
            packed, beside = self._delivery(self._heard)
        self._call(self.actor.backend_exchange, packed, beside, self._exchanged)
        return True

    def _call(self, method: Any, packed: bytes, beside: list[Any], done: Any) -> None:
        try:
            # The future keeps the reference alive, which Ray needs.
            method.remote(packed, *beside).future().add_done_callback(done)
        except BaseException:
            # The messages are lost, and the worker would wait for them, so it has to be replaced.
            self.fetching = False
            self.kill()
            raise

    def _exchanged(self, answer: Future[Any]) -> None:
        error = answer.exception()
        messages = [error] if error is not None else answer.result()
        with self._lock:
            # After an error the worker is dead, and must not be called again.
            self.fetching = error is not None
            self._heard += len(messages)
            self._expected += sum(isinstance(thing, Unasked) for thing in messages)
            self.received_at = time.monotonic()
        self._report(messages)

    def _report(self, messages: list[Any]) -> None:
        backend = self._backend()
        if backend is not None:
            backend.add_messages(self, messages)

    def _delivery(self, heard: int | None) -> tuple[bytes, list[Any]]:
        """Packs all waiting messages; returns the bytes, and their arrays and references."""
        messages, self._waiting = self._waiting, []
        number = self._calls
        self._calls += bool(messages)
        return Delivery(heard, number, self._interruption).packed(messages)

    def _deliver(self) -> None:
        with self._lock:
            if self._under_way >= _UNDER_WAY or not self._waiting or not self._reachable:
                return
            self._under_way += 1
            packed, beside = self._delivery(None)
        self._call(self.actor.backend_deliver, packed, beside, self._delivered)

    def _delivered(self, answer: Future[Any]) -> None:
        answer.exception()
        with self._lock:
            self._under_way -= 1
        self._deliver()

    @override
    def interrupt(self, number: int) -> None:
        with self._lock:
            self._interruption = number, self._interruption[1] + 1
            interruption = self._interruption
        if self._reachable:
            self.actor.backend_interrupt.remote(interruption)

    def report_lost(self) -> None:
        """Reports the end of the worker if the connection to Ray is gone."""
        if not self.removed and not self._connection.alive:
            self._report([ConnectionError("the connection to Ray was shut down")])

    @override
    def stop(self) -> None:
        if not self._reachable:
            self.report_lost()
            return
        self.told_to_stop = True
        if self.pid is None:
            # The actor may never begin, and there is nothing to close yet.
            self.kill()
        else:
            self.actor.backend_stop.remote()

    @override
    def kill(self) -> None:
        if not self._reachable:
            self.report_lost()
            return
        self._killed = True
        import ray

        with contextlib.suppress(ValueError):
            ray.kill(self.actor)

    def explain(self, error: BaseException) -> str:
        """Returns the cause of the worker's death, as the end of a sentence."""
        if self._killed:
            return "was killed"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        known = [line for line in lines if line.startswith("The actor is dead because ")]
        if known:
            return "died: " + known[0].removeprefix("The actor is dead because ")
        return f"died: {lines[0] if lines else type(error).__name__}"


_BACKEND = "backend"


def actor_class(methods: Iterable[str]) -> Any:
    """Makes the class of actors whose handles have methods of the worker's service.

    The class is sent to actors by value, because no module contains it.

    Calls of these methods run in a separate thread, so they never keep the backend waiting. If the
    actor's ``max_concurrency`` is 1, Ray begins these calls in the order in which a caller makes
    them.

    Args:
        methods: names of methods. Each call goes to the service as a
            :class:`~trawl.backends.base.HandleCall`, except ``shutdown``, which ends the worker.
    """
    import ray

    grouped = ray.method(concurrency_group=_BACKEND)
    own = {name: _method(name) for name in methods}
    own |= {name: grouped(getattr(RayActor, name)) for name in RayActor.of_backend}
    kind = type("RayWorkerActor", (RayActor,), own)
    return ray.remote(concurrency_groups={_BACKEND: CONCURRENCY})(kind)


def _method(name: str) -> Any:
    if name == "shutdown":

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.backend_end()

    else:

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.backend_ask(name, args, kwargs)

    call.__name__ = call.__qualname__ = name
    return call
