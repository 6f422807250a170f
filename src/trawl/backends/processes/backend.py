"""Workers in local processes, which share memory with this process."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.backends.base import Death, Event, Failed, MakeService, Message, OwningBackend, Worker
from trawl.backends.blocks import BlockAllocator, SharedBlock
from trawl.backends.failure import Failure
from trawl.backends.ipc import Closed, IpcConnection, connection_pair
from trawl.backends.memory import SharedMemory
from trawl.backends.processes.handle import ServerHandle
from trawl.backends.processes.loop import Surroundings, explain
from trawl.backends.processes.payload import Package, SpawnPayload
from trawl.backends.processes.worker import INTERRUPTION_BYTES
from trawl.checks import require_linux

START_METHODS = ("forkserver", "spawn")
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class ProcessBackend(OwningBackend):
    """Backend whose workers are local processes.

    Args:
        start_method: ``"forkserver"`` forks workers from a process that has already imported the
            modules they need; ``"spawn"`` starts a fresh interpreter for each worker.
    """

    shares_memory = sends_descriptors = True
    _living: set[ProcessWorker]

    def __init__(self, start_method: str = "forkserver") -> None:
        require_linux("workers in other processes")
        super().__init__()
        if start_method not in START_METHODS:
            raise ValueError(
                f"start_method={start_method!r} is not one of {', '.join(map(repr, START_METHODS))}"
            )
        self._method = start_method
        self._selector = selectors.EpollSelector()
        # Events stay here if an exception, such as KeyboardInterrupt, ends the wait for more.
        self._events: list[Event] = []
        self._blocks = BlockAllocator(SharedMemory.new)

    @override
    def launch(self, index: int, make: MakeService) -> ProcessWorker:
        self._check_open()
        payload = SpawnPayload(make)
        interruptions = SharedMemory.new(INTERRUPTION_BYTES)
        connection, theirs = connection_pair()
        try:
            with theirs:
                source, pid, handle = ServerHandle.launch(
                    self._method, [theirs.fileno(), interruptions.fd]
                )
        except BaseException:
            connection.close()
            raise
        worker = ProcessWorker(
            index, connection, interruptions, pid, handle, source, self._watch_room
        )
        self._living.add(worker)
        self._selector.register(connection, selectors.EVENT_READ, worker)
        if handle is not None:
            self._selector.register(handle, selectors.EVENT_READ, worker)
        worker.post((Surroundings.here(), index, payload.data), payload.fds)
        return worker

    @override
    def pack(self, parts: Sequence[Any], copied: Sequence[int] = ()) -> Package:
        return Package.shared(parts, copied)

    @override
    def wait(self, timeout: float | None = None) -> list[Event]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._events:
            if not self._living:
                if timeout is None:
                    raise RuntimeError("there is no worker to wait for")
                break
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._receive_all(left)
            # If this process was suspended, only a look after the deadline finds what has come.
            if left == 0:
                break
        events, self._events = self._events, []
        return events

    def __del__(self) -> None:
        # A worker ends by itself when its connection is closed. Ctrl-C may end a constructor before
        # it has begun.
        for worker in self.__dict__.get("_living", ()):
            worker.connection.close()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while :meth:`wait` would return at once."""
        return self._selector.fileno()

    def _watch_room(self, worker: ProcessWorker) -> None:
        if worker.connection in self._selector.get_map():
            self._selector.modify(worker.connection, _BOTH, worker)

    def _receive_all(self, timeout: float | None) -> None:
        for key, ready in self._selector.select(timeout):
            worker = key.data
            if worker not in self._living:
                continue
            if key.fd == worker.handle:
                self._remove(worker)
                continue
            if ready & selectors.EVENT_WRITE and worker.flush():
                self._selector.modify(worker.connection, selectors.EVENT_READ, worker)
            if ready & selectors.EVENT_READ:
                self._receive(worker)

    def _receive(self, worker: ProcessWorker) -> bool:
        """Receives a message if there is one; returns True if there may be more."""
        try:
            (verb, content), _ = worker.connection.receive(wait=False)
        except BlockingIOError:
            return False
        except Closed:
            self._selector.unregister(worker.connection)
            if worker.handle is None:
                self._remove(worker)
            return False
        except KeyboardInterrupt:
            # The message may be lost, so the worker is killed. Its replacement gets the unanswered
            # requests.
            worker.kill()
            raise
        except Exception as error:
            # The message can't be unpickled. Messages of other workers must not be lost.
            self._events.append(Failed(worker, Failure.of(error)))
            worker.kill()
            return False
        kind = Failed if verb == "failed" else Message
        self._events.append(kind(worker, content))
        return True

    def _remove(self, worker: ProcessWorker) -> None:
        """Receives the last messages of a dead worker, and queues its death."""
        self._living.discard(worker)
        while worker.connection in self._selector.get_map() and self._receive(worker):
            pass
        for part in (worker.connection, worker.handle):
            if part is not None and part in self._selector.get_map():
                self._selector.unregister(part)
        status = worker.close()
        expected = worker.told_to_stop and status in (0, -signal.SIGTERM)
        self._events.append(Death(worker, explain(status), expected))

    @override
    def allocate(self, nbytes: int) -> SharedBlock:
        return self._blocks.allocate(nbytes)

    @override
    def _end(self, first: bool) -> None:
        while self._living:
            self._receive_all(None)
        self._events.clear()
        self._selector.close()


class ProcessWorker(Worker):
    """Worker in a local process.

    Attributes:
        pid: id of the process.
        handle: a pidfd, which is readable once the process has ended; None if the system has no
            pidfds.
        told_to_stop: True if :meth:`stop` was called.
    """

    def __init__(
        self,
        index: int,
        connection: IpcConnection,
        interruptions: SharedMemory,
        pid: int,
        handle: int | None,
        source: ServerHandle,
        watch_room: Callable[[ProcessWorker], None],
    ) -> None:
        self.index = index
        self.connection = connection
        self.pid = pid
        self.handle = handle
        self.told_to_stop = False
        # Blocks that are shared with the worker by name, each with the number of its file, and the
        # count of these blocks in each file. A block that is kept here keeps its slot.
        self._shared: dict[int, tuple[int, NDArray[np.uint8]]] = {}
        self._blocks_of: Counter[int] = Counter()
        self._interruptions = np.frombuffer(interruptions.buffer, dtype=np.int64)
        self._source = source
        # A weak reference, so that a dropped backend is freed, and ends its workers, at once.
        self._watch_room = weakref.WeakMethod(watch_room)
        self._removed = False
        self._owner = os.getpid()

    @override
    def send(self, content: Any) -> None:
        self.post(("message", content))

    @override
    def share(self, name: int, memory: SharedBlock) -> None:
        self.forget(name)
        file = memory.file
        fds = [] if self._blocks_of[file.number] else [file.memory.fd]
        place = (file.number, file.memory.nbytes, memory.offset, memory.buffer.nbytes)
        self.post(("share", name, place), fds)
        self._shared[name] = file.number, memory.buffer
        self._blocks_of[file.number] += 1

    @override
    def forget(self, name: int) -> None:
        if name not in self._shared:
            return
        file, _ = self._shared.pop(name)
        self._blocks_of[file] -= 1
        self.post(("forget", name, file if not self._blocks_of[file] else None))

    @override
    def interrupt(self, number: int) -> None:
        self._interruptions[0] = number

    @override
    def stop(self) -> None:
        self.told_to_stop = True
        self.post(("stop",))
        self._signal(signal.SIGTERM)

    @override
    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def post(self, content: Any, fds: Sequence[int] = ()) -> None:
        """Sends a message now or, if the socket has no room, while the backend waits."""
        if self._owner != os.getpid():
            # This is a copy of the worker in a forked process, which does not own it.
            return
        with contextlib.suppress(Closed):
            self.connection.post(content, fds)
            if self.connection.full and (watch := self._watch_room()) is not None:
                watch(self)

    def flush(self) -> bool:
        """Sends messages for which there was no room before; returns True if none are left."""
        try:
            return self.connection.flush()
        except Closed:
            return True

    def close(self) -> int | None:
        """Releases the resources of a process that has ended; returns its exit status."""
        self._removed = True
        self._shared.clear()
        self.connection.close()
        if self.handle is not None:
            os.close(self.handle)
        return self._source.reap(self.pid)

    def _signal(self, signum: int) -> None:
        # Once the worker is removed, its pid and descriptor may have been reused.
        if self._removed or self._owner != os.getpid():
            return
        with contextlib.suppress(ProcessLookupError):
            if self.handle is None:
                os.kill(self.pid, signum)
            else:
                signal.pidfd_send_signal(self.handle, signum)
