"""Workers that are reached over a network: the code that all such backends share in the driver.

For each worker, one thread receives its messages, and another sends the messages that it must
receive while it works. Orders go over a connection of their own (:mod:`trawl.backends.order_line`).
A worker is dead once its connection is closed and, if that can be known, its process has ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from queue import SimpleQueue
from typing import Any

import cloudpickle
from typing_extensions import override

from trawl.backends.base import Backend, Death, Event, Failed, MakeService, Message, Worker
from trawl.backends.failure import Failure
from trawl.backends.launch import Launcher, Process
from trawl.backends.order_line import OrderLine
from trawl.backends.remote_packing import (
    ENDED,
    FAILED,
    INTERRUPT,
    KILL,
    MESSAGE,
    STOP,
    Order,
    Packed,
    pack,
)
from trawl.memory import PrivateMemory

# Seconds to wait for messages from before the end of a process; its children may keep its
# connection open.
_LATE = 1.0
# Seconds after which a killed worker counts as dead if its process can't be observed.
_GONE = 3.0


class RemoteBackend(Backend):
    """Backend whose workers are reached over a network.

    Large arrays in messages to workers are not copied: the caller must not change them later.

    Args:
        launcher: starts the workers' processes; this object closes it.
    """

    shares_memory = False
    isolated = True

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._changed = threading.Condition()
        self._living: set[RemoteWorker] = set()
        self._events: deque[tuple[RemoteWorker, Packed | Death]] = deque()
        self._closed = False
        self._owner = os.getpid()

    # --- what a subclass does

    @abstractmethod
    def _new_worker(self, index: int) -> RemoteWorker:
        """Returns a worker that is not started yet."""

    @abstractmethod
    def _let_go(self) -> None:
        """Releases the resources by which connections are made."""

    # --- what a backend does

    @override
    def launch(self, index: int, make: MakeService) -> RemoteWorker:
        if self._closed:
            raise RuntimeError("this backend is closed: make another one")
        first = pack(MESSAGE, Order((list(sys.path), cloudpickle.dumps(make))))
        worker = self._new_worker(index)
        try:
            worker.orders.send(first)
            with self._changed:
                self._living.add(worker)
            worker.begin()
        except BaseException:
            with self._changed:
                self._living.discard(worker)
            worker.orders.close()
            raise
        return worker

    @override
    def wait(self, timeout: float | None = None) -> list[Event]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._changed:
                while not self._events:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return []
                    if left is None and not self._living:
                        raise RuntimeError("there is no worker to wait for")
                    self._changed.wait(left)
            found = [event for event in self._read() if event is not None]
            if found:
                return found

    def _read(self) -> list[Event | None]:
        found: list[Event | None] = []
        while self._events:
            worker, packed = self._events[0]
            # A message stays in the queue until it is read, as Ctrl-C may interrupt that.
            event = packed if isinstance(packed, Death) else worker.read(packed)
            self._events.popleft()
            found.append(event)
        return found

    @override
    def allocate(self, nbytes: int) -> PrivateMemory:
        # Workers have no access to it.
        return PrivateMemory(nbytes)

    @override
    def close(self) -> None:
        if self._owner != os.getpid():
            # This is a copy of the backend in a forked process, which does not own the workers.
            return
        with self._changed:
            first, self._closed = not self._closed, True
            living = list(self._living)
        for worker in living:
            worker.kill()
        with self._changed:
            self._changed.wait_for(lambda: not self._living, _GONE + _LATE)
            self._living.clear()
            self._events.clear()
            self._changed.notify_all()
        if first:
            self.launcher.close()
            self._let_go()

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True):
            self.close()

    # --- what threads tell

    def note(self, worker: RemoteWorker, packed: Packed) -> None:
        """Queues a message of a worker."""
        with self._changed:
            if worker in self._living:
                self._events.append((worker, packed))
                self._changed.notify_all()

    def check(self, worker: RemoteWorker) -> None:
        """Queues the death of a worker if it is dead, now that something has changed."""
        with self._changed:
            if worker in self._living and worker.dead:
                self._living.discard(worker)
                self._events.append((worker, worker.death()))
                worker.let_go()
                self._changed.notify_all()


class RemoteWorker(Worker):
    """Worker that is reached over a network.

    Args:
        index: number of the worker.
        backend: backend of the worker.
        orders: the connection for orders.

    Attributes:
        orders: the connection for orders.
        told_to_stop: True if :meth:`stop` was called.
        ended: the exit status that the worker reported; None before.
        out_of_reach: True if the worker can't be reached.
    """

    def __init__(self, index: int, backend: RemoteBackend, orders: OrderLine) -> None:
        self.index = index
        self.orders = orders
        self._backend = backend
        self._outbox: SimpleQueue[Packed | None] = SimpleQueue()
        self._process: Process | None = None
        self._owner = os.getpid()
        self.told_to_stop = False
        self.ended: int | None = None
        self.out_of_reach = False
        self._linked = self._cut = self._late = False
        self._interruption, self._heard = (0, 0), 0
        self._exit: str | None = None
        self._why = "lost its connection"
        self._who = ""

    # --- what a subclass does

    @abstractmethod
    def begin(self) -> None:
        """Starts the worker's process, and the threads that talk to it."""

    # --- what a worker does

    @override
    def send(self, content: Any) -> None:
        packed = pack(MESSAGE, Order(content, self._interruption, self._heard))
        if self._owner == os.getpid():
            self.orders.send(packed)

    @override
    def share(self, name: int, memory: Any) -> None:
        pass

    @override
    def forget(self, name: int) -> None:
        pass

    @override
    def interrupt(self, number: int) -> None:
        self._interruption = number, self._interruption[1] + 1
        self.put(pack(INTERRUPT, self._interruption))

    @override
    def stop(self) -> None:
        self.told_to_stop = True
        self.put(Packed(STOP))

    @override
    def kill(self) -> None:
        if self._owner != os.getpid() or self._cut:
            return
        self.put(Packed(KILL))
        if self._process is not None:
            self._process.kill()
        if self._process is None or not self._process.tells:
            _after(_GONE, self.lose, "was killed")

    def put(self, packed: Packed | None) -> None:
        """Sends a message that the worker receives while it works; None ends the sending thread."""
        if self._owner == os.getpid():
            self._outbox.put(packed)

    def let_go(self) -> None:
        """Ends the sending thread, and closes the connection for orders."""
        self.put(None)
        self.orders.close()

    # --- what threads tell

    def linked(self) -> None:
        """Notes that there is a connection."""
        self._linked = True

    def heard(self, packed: Packed) -> None:
        """Handles a message of the worker."""
        self._heard += 1
        if packed.verb == ENDED:
            self.ended = packed.content()
        else:
            self._backend.note(self, packed)

    def cut(self, why: str | None = None) -> None:
        """Handles the end of the connection, or that none will ever be made."""
        if self._cut:
            return
        self._cut = True
        if why is not None:
            self._why = why
        if self.ended is None and self._process is not None:
            # The process may live, but can no longer be told anything.
            self._process.kill()
        self._backend.check(self)

    def lose(self, why: str | None) -> None:
        """Gives up a worker that can't be reached: it counts as dead, whatever it does.

        Args:
            why: the reason of its death; None for the usual one, that it lost its connection.
        """
        if self._cut:
            return
        self.out_of_reach = True
        # If the worker can be reached again, this ends it. Until then the kernel tries in vain to
        # send this, so that it gives up the connection and wakes threads that wait for more.
        self.put(Packed(KILL))
        self.cut(why)

    def exited(self, reason: str) -> None:
        """Handles the end of the process."""
        self._exit = reason
        if self._linked and not self._cut:
            _after(_LATE, self._give_up)
        self._backend.check(self)

    def _give_up(self) -> None:
        self._late = True
        self._backend.check(self)

    # --- in the thread that waits

    @property
    def dead(self) -> bool:
        """True if nothing more comes from the worker."""
        if self._exit is not None:
            return self._cut or self._late or not self._linked
        return self._cut and (self._process is None or not self._process.tells)

    def death(self) -> Death:
        """Returns the event of the worker's death."""
        reason = self._exit or self._why
        if self.ended is not None and self._exit is None:
            reason = f"exited with status {self.ended}"
        return Death(self, self._who + reason, self.told_to_stop and self.ended == 0)

    def read(self, packed: Packed) -> Event | None:
        """Returns the event that a message stands for."""
        try:
            content = packed.content()
        except Exception as error:
            # The message can't be unpickled. Messages of other workers must not be lost.
            self.kill()
            return Failed(self, Failure.of(error))
        if packed.verb == FAILED:
            return Failed(self, content)
        return Message(self, content)


def _after(seconds: float, call: Any, *arguments: Any) -> None:
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()
