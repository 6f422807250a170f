"""Workers in local processes, which share memory with this process."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from trawl.backends.base import Death, MakeService
from trawl.backends.ipc import Closed, IpcConnection, connection_pair
from trawl.backends.memory import SharedMemory
from trawl.backends.processes.handle import ServerHandle
from trawl.backends.processes.local import ENDED, INTERRUPTION_BYTES, LocalBackend, LocalWorker
from trawl.backends.processes.loop import NOTHING, Surroundings, explain
from trawl.backends.processes.payload import Package, SpawnPayload
from trawl.checks import require_linux

START_METHODS = ("forkserver", "spawn")
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class ProcessBackend(LocalBackend):
    """Backend whose workers are local processes.

    Args:
        start_method: ``"forkserver"`` forks workers from a process that has already imported the
            modules they need; ``"spawn"`` starts a fresh interpreter for each worker.
    """

    sends_descriptors = True
    _living: set[ProcessWorker]

    def __init__(self, start_method: str = "forkserver") -> None:
        require_linux("workers in other processes")
        super().__init__(SharedMemory.new)
        if start_method not in START_METHODS:
            raise ValueError(
                f"start_method={start_method!r} is not one of {', '.join(map(repr, START_METHODS))}"
            )
        self._method = start_method
        self._selector = selectors.EpollSelector()

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
        worker.post_with((Surroundings.here(), index, payload.data), payload.fds)
        return worker

    @override
    def pack(self, parts: Sequence[Any], copied: Sequence[int] = ()) -> Package:
        return Package.shared(parts, copied)

    def __del__(self) -> None:
        # A worker ends by itself when its connection is closed. Ctrl-C may end a constructor before
        # it has begun.
        for worker in self.__dict__.get("_living", ()):
            worker.connection.close()

    @override
    def fileno(self) -> int:
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

    @override
    def _forget_connection(self, worker: ProcessWorker) -> None:
        self._selector.unregister(worker.connection)
        if worker.handle is None:
            self._remove(worker)

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
    def _end(self, first: bool) -> None:
        while self._living:
            self._receive_all(None)
        self._events.clear()
        self._selector.close()


class ProcessWorker(LocalWorker):
    """Worker in a local process.

    Attributes:
        pid: id of the process.
        handle: a pidfd, which is readable once the process has ended; None if the system has no
            pidfds.
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
        super().__init__(index, interruptions)
        self.connection = connection
        self.pid = pid
        self.handle = handle
        self._source = source
        # A weak reference, so that a dropped backend is freed, and ends its workers, at once.
        self._watch_room = weakref.WeakMethod(watch_room)
        self._removed = False

    @override
    def receive(self) -> Any:
        try:
            message, _ = self.connection.receive(wait=False)
        except BlockingIOError:
            return NOTHING
        except Closed:
            return ENDED
        return message

    @override
    def stop(self) -> None:
        self.told_to_stop = True
        self.post(("stop",))
        self._signal(signal.SIGTERM)

    @override
    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    @override
    def post(self, content: Any, memory: SharedMemory | None = None) -> None:
        self.post_with(content, [] if memory is None else [memory.fd])

    def post_with(self, content: Any, fds: Sequence[int]) -> None:
        """Sends a message and descriptors now, or while the backend waits if there is no room."""
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
