"""Workers in Ray actors, on any node of a cluster."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

from trawl.backends.authentication import KEY_BYTES
from trawl.backends.base import Backend, Death, Event, Failed, MakeService, Message, Worker
from trawl.backends.failure import Failure
from trawl.backends.listener import Listener
from trawl.backends.order_line import OrderLine
from trawl.backends.ray_actor import Barrier, End, Hello, Unasked
from trawl.backends.ray_cluster import Connection, Place
from trawl.backends.ray_handle import actor_class
from trawl.backends.ray_wire import Letter, Packed, pack, pack_code, unpack
from trawl.backends.remote_packing import MESSAGE
from trawl.backends.remote_packing import Packed as Sheet

# Calls with messages for an actor that are under way at a time. What is sent meanwhile goes
# together, when one of them has returned.
_UNDER_WAY = 4
# Seconds after which workers in step that nobody has told anything are asked what they say.
_SOON = 0.02
# Seconds in which an actor is to get to its line; otherwise it does without it.
_LINING = 5.0
# Seconds in which actors that were killed are to be gone.
_DYING = 10.0


class PrivateMemory:
    """Memory of this process alone.

    Args:
        nbytes: its size.

    Attributes:
        buffer: the memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.buffer = bytearray(nbytes)


class RayBackend(Backend):
    """Workers in actors of a Ray cluster that this process is connected to.

    Args:
        options: options of the actors (``num_cpus``, ``resources``, …), as ``ray.remote`` takes
            them: for all, or in a list by index, which may grow.
        patience: seconds that an actor may wait for its resources; None: as long as it takes.
        in_step: whether a worker that has answered is told something before it has to do anything.
            What it says next is asked for by that call then, which saves one of two.
        methods: methods of the service that holders of an actor's handle may call.

    Attributes:
        handles: the actors' handles by index. The list is kept up to date: the handle of a
            replacement takes the position of its predecessor's.
    """

    shares_memory = False
    isolated = True

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
        self._living: set[RayWorker] = set()
        self._events: list[Event] = []
        self._came: deque[tuple[RayWorker, Any]] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._listener: Listener | None = None
        self._launches = itertools.count()
        self._owner = os.getpid()

    def options(self, index: int) -> dict[str, Any]:
        """The options of the actor of a worker."""
        if isinstance(self._options, Mapping):
            return dict(self._options)
        return dict(self._options[index]) if index < len(self._options) else {}

    @override
    def launch(self, index: int, make: MakeService) -> RayWorker:
        if self._closed:
            raise RuntimeError("this backend is closed: make another one")
        self._connection.check()
        made, refs = pack_code(make)
        # One thread carries out the calls of holders of a handle, in their order.
        own = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1}
        asked = self.options(index)
        place = Place(asked, self._patience, [other.asked for other in self._unplaced()])
        orders = self._new_orders()
        meeting = None if orders is None else orders.meeting
        if self._kind is None:
            self._kind = actor_class(self._methods)
        kind = self._kind.options(**{**asked, **own})
        actor = kind.remote(made, refs, list(sys.path), meeting)
        self.handles[index : index + 1] = [actor]
        worker = RayWorker(index, actor, self._connection, orders, asked, place, weakref.ref(self))
        with self._changed:
            self._living.add(worker)
        worker.listen()
        return worker

    def _new_orders(self) -> OrderLine | None:
        """The line by which the next worker is told what is small; None if there can be none."""
        import ray

        if self._listener is None:
            # The address that Ray knows this machine by may be that of another, which passes on.
            with contextlib.suppress(OSError):
                self._listener = Listener(ray.util.get_node_ip_address())
        if self._listener is None:
            return None
        name = f"worker {next(self._launches)}"
        return OrderLine(self._listener, name, os.urandom(KEY_BYTES), _LINING)

    def hear(self, worker: RayWorker, said: list[Any]) -> None:
        """Takes what a worker said, or what happened to it. Called by any thread."""
        with self._changed:
            self._came.extend((worker, thing) for thing in said)
            self._changed.notify_all()
        if not self._closed and (not self._in_step or worker.owes):
            worker.listen()

    @override
    def wait(self, timeout: float | None = None) -> list[Event]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._events:
            if not self._living and timeout is None:
                raise RuntimeError("there is no worker to wait for")
            if not self._came and not self._connection.alive:
                for worker in self._living:
                    worker.lose()
            over = self._await(deadline)
            with self._changed:
                came, self._came = self._came, deque()
            while came:
                self._read(*came.popleft())
            if over:
                break
        events, self._events = self._events, []
        return events

    def _await(self, deadline: float | None) -> bool:
        """Waits until something came, or was to be done; tells whether the time is up."""
        due: Callable[[], None] | None = None
        with self._changed:
            while not self._came and due is None:
                now = time.monotonic()
                late = [] if self._closed else self._late()
                limits = [limit for limit in (deadline, *late) if limit is not None]
                # Who has answered is likely to be asked together with his next order.
                deaf = [one.heard_at + _SOON for one in self._living if not one.listening]
                if deaf and (now >= min(deaf) or len(deaf) == len(self._living)):
                    due = self._listen
                elif deadline is not None and now >= deadline:
                    return True
                elif late and now >= min(late):
                    due = self._check_resources
                else:
                    limits += deaf
                    self._changed.wait(min(limits) - now if limits else None)
        # Ray is called without the lock: it may just be calling back, and wait for the lock.
        if due is not None:
            due()
        return deadline is not None and time.monotonic() >= deadline

    def _listen(self) -> None:
        for worker in self._living:
            worker.listen()

    def _unplaced(self) -> list[RayWorker]:
        return [worker for worker in self._living if worker.pid is None]

    def _late(self) -> list[float]:
        """When there is something to be said of actors that wait for a place."""
        return [one.place.late for one in self._unplaced() if one.place.late is not None]

    def _check_resources(self) -> None:
        """Refuses to wait longer for an actor that there is no place for.

        Raises:
            RuntimeError: naming what the cluster lacks.
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
            worker.pid, worker.node, lined = thing
            worker.meet(lined)
        elif isinstance(thing, End):
            if thing.failure is not None:
                self._events.append(Failed(worker, thing.failure))
            status = 0 if thing.failure is None else 1
            self._bury(worker, f"exited with status {status}", expected=status == 0)
        elif isinstance(thing, BaseException):
            if worker.told_to_stop and worker.pid is None:
                self._bury(worker, "was stopped before it began", expected=True)
            else:
                self._bury(worker, worker.explain(thing), expected=False)
        elif not worker.unreadable:
            try:
                packed = thing.packed if isinstance(thing, Unasked) else thing
                self._events.append(Message(worker, unpack(packed)))
            except Exception as error:
                # It means nothing here. Others' messages are not to be lost by that.
                self._events.append(Failed(worker, Failure.of(error)))
                worker.unreadable = True
                worker.kill()

    def _bury(self, worker: RayWorker, reason: str, expected: bool) -> None:
        self._living.discard(worker)
        if self._connection.alive:
            worker.kill()
        worker.buried = True
        worker.let_go()
        self._events.append(Death(worker, reason, expected))

    @override
    def allocate(self, nbytes: int) -> Any:
        # Actors share no memory that they could write to.
        return PrivateMemory(nbytes)

    @override
    def close(self) -> None:
        if self._owner != os.getpid():
            # A copy of this object in another process: the workers are not its own.
            return
        self._closed = True
        for worker in self._living:
            worker.kill()
        deadline = time.monotonic() + _DYING
        with contextlib.suppress(RuntimeError):
            while self._living and time.monotonic() < deadline:
                self.wait(deadline - time.monotonic())
        for worker in self._living:
            worker.let_go()
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
    """A worker in an actor.

    Attributes:
        actor: the handle of the actor.
        orders: the line by which it is told what is small, once it is known to have it; or None.
        asked: the options that it was asked for with.
        place: its wait for a place.
        pid: its process, once it is known; None until it has begun.
        node: the id of the node that it is on.
        listening: whether it was asked for what it says next, or can't be.
        heard_at: when it was last heard.
        told_to_stop: whether it was told to.
        unreadable: whether it said what can't be read.
        buried: whether its death was told.
    """

    def __init__(
        self,
        index: int,
        actor: Any,
        connection: Connection,
        orders: OrderLine | None,
        asked: Mapping[str, Any],
        place: Place,
        backend: weakref.ref[RayBackend],
    ) -> None:
        self.index = index
        self.actor = actor
        self.orders = orders
        self.asked = asked
        self.place = place
        self.pid: int | None = None
        self.node: str | None = None
        self.told_to_stop = self.unreadable = self.buried = False
        self.listening = self._killed = False
        self.heard_at = time.monotonic()
        # How many of its messages were heard, and how many of these it was told of by the line.
        self._heard = self._confirmed = 0
        self._lined = False
        self._barriers = 0
        # What is to be heard: first, unasked, that it has begun and that it is ready.
        self._expected = 2
        self._connection = connection
        self._backend = backend
        self._lock = threading.RLock()
        self._waiting: list[Packed] = []
        self._under_way = self._calls = 0
        self._interruption = (0, 0)

    @property
    def _reachable(self) -> bool:
        return not self.buried and not self._killed and self._connection.alive

    @override
    def send(self, content: Any) -> None:
        packed = pack(content)
        if not self._reachable:
            return
        with self._lock:
            self._waiting.append(packed)
            self._expected += 1
        self._write()
        if not self._waiting:
            self.listen()
        elif not self._exchange():
            self._deliver()

    def await_calls(self) -> None:
        """Holds what it is told after this until the calls of its handle before this are done."""
        if self._reachable:
            self._barriers += 1
            self.actor.backend_mark.remote(self._barriers)
            self.send(Barrier(self._barriers))

    def meet(self, lined: bool) -> None:
        """It has begun, and has come to its line, or found no way to that."""
        if lined and self.orders is not None:
            with contextlib.suppress(OSError):
                self.orders.meet()
                self._lined = True
        if not self._lined:
            self.let_go()
        self._write()

    def let_go(self) -> None:
        """Nothing more goes by the line."""
        if self.orders is not None:
            self.orders.close()

    def listen(self) -> None:
        """Asks for what it says next, if that was not done."""
        if not self.listening and not self.buried and self._connection.alive:
            # It waits for that, and a call takes longer.
            if self._confirmed < self._heard:
                self._write()
            self._exchange()

    def _write(self) -> None:
        """Sends a letter by the line, if there is one; but what is large waits for a call."""
        if self.orders is None or not self._lined:
            return
        try:
            with self._lock:
                if any(packed.arrays or packed.refs for packed in self._waiting):
                    return
                self._confirmed = self._heard
                self.orders.send(Sheet(MESSAGE, self._letter(self._heard)[0]))
        except BaseException:
            # As in _call.
            self.kill()
            raise

    @property
    def owes(self) -> bool:
        """Whether it has answered less than it was told."""
        return self._heard < self._expected

    # Ray is called without the lock: it may just be calling back, and wait for the lock.

    def _exchange(self) -> bool:
        """Asks for what it says next, and brings what waits; False if it was asked already."""
        with self._lock:
            if self.listening:
                return False
            self.listening = True
            letter, beside = self._letter(self._heard)
        self._call(self.actor.backend_exchange, letter, beside, self._hear)
        return True

    def _call(self, method: Any, letter: bytes, beside: list[Any], done: Any) -> None:
        try:
            # The future keeps the reference: Ray can't do without it.
            method.remote(letter, *beside).future().add_done_callback(done)
        except BaseException:
            # What it was to be told is lost, and it would wait for it: another takes its place.
            self.listening = False
            self.kill()
            raise

    def _hear(self, answer: Future[Any]) -> None:
        error = answer.exception()
        said = [error] if error is not None else answer.result()
        with self._lock:
            # Of one that is dead nothing more will be heard.
            self.listening = error is not None
            self._heard += len(said)
            self._expected += sum(isinstance(thing, Unasked) for thing in said)
            self.heard_at = time.monotonic()
        self._tell(said)

    def _tell(self, said: list[Any]) -> None:
        backend = self._backend()
        if backend is not None:
            backend.hear(self, said)

    def _letter(self, heard: int | None) -> tuple[bytes, list[Any]]:
        """What a call brings: all messages that wait, and what Ray has to see of them."""
        messages, self._waiting = self._waiting, []
        number = self._calls
        self._calls += bool(messages)
        return Letter(heard, number, self._interruption).packed(messages)

    def _deliver(self) -> None:
        with self._lock:
            if self._under_way >= _UNDER_WAY or not self._waiting or not self._reachable:
                return
            self._under_way += 1
            letter, beside = self._letter(None)
        self._call(self.actor.backend_deliver, letter, beside, self._delivered)

    def _delivered(self, answer: Future[Any]) -> None:
        answer.exception()
        with self._lock:
            self._under_way -= 1
        self._deliver()

    @override
    def share(self, name: int, memory: Any) -> None:
        pass

    @override
    def forget(self, name: int) -> None:
        pass

    @override
    def interrupt(self, number: int) -> None:
        with self._lock:
            self._interruption = number, self._interruption[1] + 1
            interruption = self._interruption
        if self._reachable:
            self.actor.backend_interrupt.remote(interruption)

    def lose(self) -> None:
        """It went with the connection to Ray: nothing more is heard of it."""
        if not self.buried and not self._connection.alive:
            self._tell([ConnectionError("the connection to Ray was shut down")])

    @override
    def stop(self) -> None:
        if not self._reachable:
            self.lose()
            return
        self.told_to_stop = True
        if self.pid is None:
            # It may never begin: nothing was done there that is to be closed.
            self.kill()
        else:
            self.actor.backend_stop.remote()

    @override
    def kill(self) -> None:
        if not self._reachable:
            self.lose()
            return
        self._killed = True
        import ray

        with contextlib.suppress(ValueError):
            ray.kill(self.actor)

    def explain(self, error: BaseException) -> str:
        """Why it died, as the end of a sentence."""
        if self._killed:
            return "was killed"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        known = [line for line in lines if line.startswith("The actor is dead because ")]
        if known:
            return "died: " + known[0].removeprefix("The actor is dead because ")
        return f"died: {lines[0] if lines else type(error).__name__}"
