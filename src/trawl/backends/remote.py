"""Workers that are reached over a network: what all such places have in common, on this side.

A thread for each worker takes in what it sends. Its orders it has by a line of their own
(:mod:`trawl.backends.order_line`); a thread sends what it is to hear while it works. A worker is
dead once its connection is closed and, where that can be known, its process has ended.
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
from trawl.backends.inline import InlineMemory
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

# Seconds for what a process sent before its end to arrive; its children may keep its connection.
_LATE = 1.0
# Seconds after which a worker that was killed, and can't be looked at, counts as dead.
_GONE = 3.0


class RemoteBackend(Backend):
    """A place to which there are connections.

    Large arrays in messages to workers are not copied: who sends them lets them be.

    Args:
        launcher: what starts the workers' processes; this object closes it.
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
        """A worker that is not started yet."""

    @abstractmethod
    def _let_go(self) -> None:
        """Closes what connections are made by."""

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
            # What is read stays until then, if an exception comes out of it: Ctrl-C.
            event = packed if isinstance(packed, Death) else worker.read(packed)
            self._events.popleft()
            found.append(event)
        return found

    @override
    def allocate(self, nbytes: int) -> InlineMemory:
        # No worker sees it.
        return InlineMemory(nbytes)

    @override
    def close(self) -> None:
        if self._owner != os.getpid():
            # A copy of this object in another process: the workers are not its own.
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
        """Takes what a worker sent."""
        with self._changed:
            if worker in self._living:
                self._events.append((worker, packed))
                self._changed.notify_all()

    def check(self, worker: RemoteWorker) -> None:
        """Looks whether a worker is dead, now that something has changed."""
        with self._changed:
            if worker in self._living and worker.dead:
                self._living.discard(worker)
                self._events.append((worker, worker.death()))
                worker.let_go()
                self._changed.notify_all()


class RemoteWorker(Worker):
    """A worker that is reached over a network.

    Args:
        index: its number.
        backend: where it lives.
        orders: by what it has its orders.

    Attributes:
        orders: the same.
        told_to_stop: whether it was told to.
        ended: the status that it said it ended with; None before.
        out_of_reach: whether nothing can be said to it.
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
        """Sends what it is to hear while it works; None ends the thread that does it."""
        if self._owner == os.getpid():
            self._outbox.put(packed)

    def let_go(self) -> None:
        """Ends the threads, as far as that is not done by the end of the connection."""
        self.put(None)
        self.orders.close()

    # --- what threads tell

    def linked(self) -> None:
        """There is a connection."""
        self._linked = True

    def heard(self, packed: Packed) -> None:
        """The worker sent something."""
        self._heard += 1
        if packed.verb == ENDED:
            self.ended = packed.content()
        else:
            self._backend.note(self, packed)

    def cut(self, why: str | None = None) -> None:
        """There is no connection any more, or never will be."""
        if self._cut:
            return
        self._cut = True
        if why is not None:
            self._why = why
        if self.ended is None and self._process is not None:
            # It may live, but nobody could tell it anything.
            self._process.kill()
        self._backend.check(self)

    def lose(self, why: str | None) -> None:
        """It can't be reached: it counts as dead, whatever it does.

        Args:
            why: the reason of its death; None if there is nothing more to say.
        """
        if self._cut:
            return
        self.out_of_reach = True
        # Should it be reached again, it is to end. Until then this is what the system tries to
        # send, in vain: that lets it give up the connection, and who waits for more of it.
        self.put(Packed(KILL))
        self.cut(why)

    def exited(self, reason: str) -> None:
        """The process has ended."""
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
        """Whether nothing more comes from it."""
        if self._exit is not None:
            return self._cut or self._late or not self._linked
        return self._cut and (self._process is None or not self._process.tells)

    def death(self) -> Death:
        """The event of its death."""
        reason = self._exit or self._why
        if self.ended is not None and self._exit is None:
            reason = f"exited with status {self.ended}"
        return Death(self, self._who + reason, self.told_to_stop and self.ended == 0)

    def read(self, packed: Packed) -> Event | None:
        """The event that a message is."""
        try:
            content = packed.content()
        except Exception as error:
            # It means nothing here. Others' messages are not to be lost by that.
            self.kill()
            return Failed(self, Failure.of(error))
        if packed.verb == FAILED:
            return Failed(self, content)
        return Message(self, content)


def _after(seconds: float, call: Any, *arguments: Any) -> None:
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()
