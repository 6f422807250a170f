"""Workers that are reached over a network.

Three TCP connections join the driver and a worker
(:mod:`trawl.extras.clusters.network.control`). For each worker, a thread receives the worker's
messages. A worker is dead once the connection for its messages is closed and its process has ended.
If the launcher does not report the end of the process, the closed connection is enough.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from typing_extensions import override

from trawl.backends.base import Death, Event, Failed, MakeService, Message, OwningBackend, Worker
from trawl.backends.failure import Failure
from trawl.backends.processes.payload import packed
from trawl.checks import require_linux
from trawl.extras.clusters.launching.authentication import (
    KEY_BYTES,
    AuthenticationError,
    derived_key,
)
from trawl.extras.clusters.launching.launch import LaunchPlan, Process
from trawl.extras.clusters.network.control import ANSWERS, REQUESTS, SIGNALS, ControlConnection
from trawl.extras.clusters.network.frames import (
    ENDED,
    FAILED,
    INTERRUPT,
    KILL,
    MESSAGE,
    STOP,
    Frame,
    Request,
    pack,
)
from trawl.extras.clusters.network.link import Address, hosted_store
from trawl.extras.clusters.network.listener import Listener
from trawl.extras.clusters.network.rank import RENDEZVOUS
from trawl.extras.clusters.network.sockets import own_address

# The reason of a process that ended without an error.
_WELL = "exited with status 0"
# Seconds without a byte after which no more are awaited from a process that has ended: its children
# may keep its connection open.
_LATE = 1.0
# Seconds after which a killed worker counts as dead if its process can't be observed.
_GONE = 3.0
# Seconds that the receiving threads may take to end after the workers.
_LISTENING = 2.0


class RemoteBackend(OwningBackend):
    """Backend whose workers are reached over a network.

    Large arrays in messages to workers are not copied: the caller must not change them later.

    Args:
        plan: the launcher, which this object closes, and the store where workers meet this process.
        timeout: seconds that a worker may take to join.
        link_timeout: seconds that a worker's machine may be out of reach; None for no limit.
    """

    shares_memory = False
    _living: set[RemoteWorker]

    def __init__(
        self,
        plan: LaunchPlan,
        timeout: float = 300.0,
        link_timeout: float | None = None,
    ) -> None:
        require_linux("workers in other processes")
        super().__init__()
        self.launcher = plan.launcher
        self._secret = os.urandom(KEY_BYTES) if plan.secret is None else plan.secret
        self._launches: dict[int, int] = {}
        # Workers whose receiving threads were started. A launch removes those whose thread has
        # ended.
        self._started: list[RemoteWorker] = []
        self._changed = threading.Condition()
        self._events: deque[tuple[RemoteWorker, Frame | Death]] = deque()
        self._store: Any = None
        port = plan.port or 0
        if plan.store:
            self._store, port = hosted_store(plan.host, port, timeout)
        self._address = Address(plan.host, port, timeout, plan.prefix)
        if self._store is None:
            self._store = self._address.client()
        self.link_timeout = link_timeout
        # Set last, because `__del__` must not close a backend whose constructor failed.
        self.listener = Listener(own_address(plan.host, port))

    @property
    def port(self) -> int:
        """Port at which workers find the store."""
        return self._address.port

    def _new_address(self, index: int) -> Address:
        """Returns the address at which this process meets the next process of a worker."""
        launches = self._launches[index] = self._launches.get(index, -1) + 1
        prefix = f"{self._address.prefix}/{index + 1}/{launches}"
        return replace(self._address, prefix=prefix, key=derived_key(self._secret, prefix))

    def set(self, address: Address, name: str, value: Any) -> None:
        """Sets a value in the store, under one of a worker's names, if the store still exists."""
        if (store := self._store) is not None:
            store.set(f"{address.prefix}/{name}", value)

    # --- what a backend does

    @override
    def launch(self, index: int, make: MakeService) -> RemoteWorker:
        self._check_open()
        first = pack(MESSAGE, Request((list(sys.path), packed(make))))
        worker = RemoteWorker(index, self, self._new_address(index))
        try:
            worker.requests.send(first)
            with self._changed:
                self._living.add(worker)
            worker.begin()
            self._started = [other for other in self._started if other.thread.is_alive()] + [worker]
        except BaseException:
            with self._changed:
                self._living.discard(worker)
            worker.close_connections()
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
            worker, frame = self._events[0]
            # A message stays in the queue until it is read, because Ctrl-C may interrupt reading.
            event = frame if isinstance(frame, Death) else worker.read(frame)
            self._events.popleft()
            found.append(event)
        return found

    @override
    def _end(self, first: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._living, _GONE + _LATE)
            self._living.clear()
            self._events.clear()
            self._changed.notify_all()
        if first:
            self._release()

    def _release(self) -> None:
        with ExitStack() as stack:
            # The callbacks run in reverse order, and each runs even if another one raises.
            stack.callback(setattr, self, "_store", None)
            stack.callback(self.listener.close)
            stack.callback(self._join_threads)
            stack.callback(self.launcher.close)

    def _join_threads(self) -> None:
        deadline = time.monotonic() + _LISTENING
        for worker in self._started:
            # The thread of a worker that is out of reach ends only when the kernel gives up the
            # connection.
            if not worker.out_of_reach:
                worker.thread.join(max(0.0, deadline - time.monotonic()))

    def __del__(self) -> None:
        if "listener" in self.__dict__ and not self._closed:
            self.close()

    # --- what threads report

    def add_message(self, worker: RemoteWorker, frame: Frame) -> None:
        """Queues a message of a worker."""
        with self._changed:
            if worker in self._living:
                self._events.append((worker, frame))
                self._changed.notify_all()

    def check(self, worker: RemoteWorker) -> None:
        """Queues the death of a worker if it is dead. Called when the worker's state changes."""
        with self._changed:
            if worker in self._living and worker.dead:
                self._living.discard(worker)
                self._events.append((worker, worker.death()))
                worker.close_connections()
                self._changed.notify_all()


class RemoteWorker(Worker):
    """Worker that is reached over a network.

    Args:
        index: number of the worker.
        backend: backend of the worker.
        address: address at which this process meets the worker.

    Attributes:
        address: address at which this process meets the worker.
        requests: the connection for requests, which the worker's main loop reads.
        signals: the connection for signals, which the worker reads even while it works.
        answers: the connection for the worker's messages.
        process: the worker's process; None until the process is started.
        thread: the thread that receives the worker's messages.
        told_to_stop: True if :meth:`stop` was called.
        ended: the exit status that the worker reported; None until then.
        out_of_reach: True if the worker can't be reached.
    """

    def __init__(self, index: int, backend: RemoteBackend, address: Address) -> None:
        self.index = index
        self.address = address
        self._backend = backend
        limit = backend.link_timeout
        place = address.prefix, address.key, address.timeout
        self.requests = ControlConnection(backend.listener, REQUESTS, *place)
        self.requests.send(pack(MESSAGE, limit))
        self.signals = ControlConnection(backend.listener, SIGNALS, *place)
        self.answers = ControlConnection(backend.listener, ANSWERS, *place)
        if limit is not None:
            self.signals.watch(limit, self._lost)
        self.process: Process | None = None
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self._joined = False
        self._owner = os.getpid()
        self.told_to_stop = False
        self.ended: int | None = None
        self.out_of_reach = False
        self._cut = self._given_up = False
        self._lost_because: str | None = None
        self._interruption = (0, 0)
        self._exit: str | None = None
        self._why = "lost its connection"
        self._who = ""
        if not backend.launcher.replaces:
            self._who = f"(rank {index + 1}, started from outside) "

    def begin(self) -> None:
        """Starts the worker's process, and the thread that receives its messages."""
        self.process = self._backend.launcher.start(self.index, self.address, self._exited)
        listener = self._backend.listener
        self._backend.set(self.address, RENDEZVOUS, f"{listener.host} {listener.port}")
        self.thread.start()

    # --- what a worker does

    @override
    def send(self, content: Any) -> None:
        self.requests.send(pack(MESSAGE, Request(content, self._interruption)))

    @override
    def interrupt(self, number: int) -> None:
        self._interruption = number, self._interruption[1] + 1
        self.signals.send(pack(INTERRUPT, self._interruption))

    @override
    def stop(self) -> None:
        self.told_to_stop = True
        self.signals.send(Frame(STOP))

    @override
    def kill(self) -> None:
        if self._owner != os.getpid():
            return
        if not self._cut:
            self.signals.send(Frame(KILL))
        # The process may live longer than the worker and its connections.
        if self.process is not None:
            self.process.kill()
        if not (self._cut or self._is_watched):
            _after(_GONE, self._give_up_reaching, "was killed")

    def close_connections(self) -> None:
        """Closes the connections, and ends the wait for a worker that has never joined."""
        self.requests.close()
        self.signals.close()
        if self._joined:
            # The thread that receives messages closes the connection.
            self.answers.hang_up()
        else:
            self.answers.close()

    # --- in the thread that receives messages

    def _listen(self) -> None:
        """Waits until the worker joins, then receives its messages until its end."""
        try:
            self.answers.wait_connected()
            self._joined = True
            if self.process is not None:
                self.process.note_joined()
        except OSError as error:
            seconds = self.address.timeout
            self._cut_off(f"did not join within {seconds:g} s (timeout): {_first_line(error)}")
            return
        why = None
        try:
            while self.ended is None:
                self._receive(self.answers.receive())
        except AuthenticationError as error:
            why = f"was abandoned: {error}"
        except MemoryError:
            why = "was abandoned: this process has no memory for its message"
        except EOFError:
            pass
        self.answers.close()
        self._cut_off(why or self._lost_because)

    def _receive(self, frame: Frame) -> None:
        if frame.verb == ENDED:
            self.ended = frame.content()
        else:
            self._backend.add_message(self, frame)

    # --- in any thread

    def _cut_off(self, why: str | None = None) -> None:
        """Handles the end of the connection, or the failure to make one."""
        if self._cut:
            return
        self._cut = True
        if why is not None:
            self._why = why
        # A worker that has ended waits until its connections are closed.
        self.requests.close()
        self.signals.close()
        if self.process is not None:
            if self.ended is not None:
                self.process.expect_end()
            elif why is None and self._is_watched:
                # The end of the process may be the cause, and is reported soon.
                _after(_LATE, self._end_process)
            else:
                self._end_process()
        self._backend.check(self)

    def _end_process(self) -> None:
        """Kills a process that may be alive, but can no longer be controlled."""
        if self._exit is None and self.process is not None:
            self._given_up = True
            self.process.kill()

    def _lost(self, why: str | None) -> None:
        if why is None:
            # The worker's process has ended, and its last messages may be under way.
            _after(_LATE, self._give_up_reaching, None)
        else:
            self._give_up_reaching(why)

    def _give_up_reaching(self, why: str | None) -> None:
        """Gives up a worker that can't be reached. The worker then counts as dead.

        Args:
            why: cause of the death; None for the usual cause, a lost connection.
        """
        if self._cut:
            return
        self.out_of_reach = True
        # If the worker can be reached again, this signal ends it.
        self.signals.send(Frame(KILL))
        self._lost_because = self._lost_because or why
        self.answers.hang_up()
        # Otherwise the thread does, after what has come.
        if not (self._joined and self.thread.is_alive()):
            self._cut_off(why)

    def _exited(self, reason: str) -> None:
        """Handles the end of the process."""
        self._exit = reason
        if self._joined and not self._cut:
            _after(_LATE, self._give_up, self.answers.received()[0])
        self._backend.check(self)

    @property
    def _is_watched(self) -> bool:
        """True if the launcher reports the end of the worker's process."""
        return self.process is not None and self.process.reports_end

    def _give_up(self, received: int) -> None:
        """Ends the wait for messages of a process that has ended, unless bytes still come.

        Those that have come are read, however long this process has taken, or was suspended.
        """
        count, unread = self.answers.received()
        if not self.thread.is_alive():
            self._cut_off()
        elif unread or count > received:
            _after(_LATE, self._give_up, count)
        else:
            self.answers.hang_up()

    # --- in the thread that waits

    @property
    def dead(self) -> bool:
        """True if no more messages come, and the process has ended or is not watched."""
        if self._exit is not None:
            return self._cut or not self._joined
        return self._cut and not self._is_watched

    def death(self) -> Death:
        """Returns the event of the worker's death."""
        # If this process has killed the worker's, because of the connection, that is no reason.
        reason = self._why if self._given_up else self._exit or self._why
        if self.ended is not None and self._exit is None:
            reason = f"exited with status {self.ended}"
        elif self.ended is None and not self.told_to_stop and reason.startswith(_WELL):
            reason = f"ended by itself, as workers do that lose their connection: {reason}"
        return Death(self, self._who + reason, self.told_to_stop and self.ended == 0)

    def read(self, frame: Frame) -> Event | None:
        """Returns the event for a message."""
        try:
            content = frame.content()
        except Exception as error:
            # The message can't be unpickled. Messages of other workers must not be lost.
            self.kill()
            return Failed(self, Failure.of(error))
        if frame.verb == FAILED:
            return Failed(self, content)
        return Message(self, content)


def _after(seconds: float, call: Any, *arguments: Any) -> None:
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()


def _first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its type if there is none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
