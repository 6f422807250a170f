"""Workers in local processes on any system, through Python's standard library alone.

Each worker is a fresh interpreter. Messages are pickles in a pipe of ``multiprocessing``; memory is
shared under a name (``multiprocessing.shared_memory``). A second pipe tells each side that the
other one has ended: the system closes it however a process ends.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.shared_memory import SharedMemory
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.backends.base import (
    Death,
    MakeService,
    Service,
)
from trawl.backends.processes.local import (
    ENDED,
    INTERRUPTION_BYTES,
    LocalBackend,
    LocalPort,
    LocalWorker,
)
from trawl.backends.processes.loop import (
    NOTHING,
    Stopped,
    Surroundings,
    explain,
    interpreter_command,
    leave,
)
from trawl.backends.processes.payload import packed

if sys.platform != "win32":
    import fcntl

_WINDOWS = os.name == "nt"
# Seconds between two looks at processes: a process that a worker forked may hold its pipes open.
_LOOK = 1.0
# Seconds that a worker has to close its service once nothing refers to it.
_CLOSING = 5.0


class PortableBackend(LocalBackend):
    """Backend whose workers are local processes, on any system.

    A worker takes as long to start as Python takes to import torch.
    """

    _living: set[PortableWorker]

    def __init__(self) -> None:
        super().__init__(NamedMemory.new)

    @override
    def launch(self, index: int, make: MakeService) -> PortableWorker:
        self._check_open()
        worker = PortableWorker(index, packed(make))
        self._living.add(worker)
        return worker

    @override
    def _receive_all(self, timeout: float | None) -> None:
        pipes = {pipe: worker for worker in self._living for pipe in worker.pipes}
        ready = wait(list(pipes), _LOOK if timeout is None else min(timeout, _LOOK))
        for worker in {pipes[pipe]: None for pipe in ready}:  # type: ignore[index]
            if worker.life not in ready:
                self._receive(worker)
        for worker in list(self._living):
            if worker.life in ready or worker.process.poll() is not None:
                self._remove(worker)

    @override
    def _forget_connection(self, worker: PortableWorker) -> None:
        worker.pipes.remove(worker.connection)

    def _remove(self, worker: PortableWorker) -> None:
        """Receives the last messages of a dead worker, and queues its death."""
        self._living.discard(worker)
        while worker.connection in worker.pipes and self._receive(worker):
            pass
        status = worker.close()
        expected = worker.told_to_stop and status in (0, -signal.SIGTERM)
        self._events.append(Death(worker, explain(status), expected))

    @override
    def _end(self, first: bool) -> None:
        while self._living:
            self._receive_all(None)
        self._events.clear()


class PortableWorker(LocalWorker):
    """Worker in a local process.

    Args:
        index: number of the worker.
        program: the pickled maker of its service.

    Attributes:
        process: the process.
        pid: its id.
        connection: pipe for messages.
        life: pipe that is closed when the process ends.
        pipes: the pipes from which something may come.
    """

    def __init__(self, index: int, program: bytes) -> None:
        interruptions = NamedMemory.new(INTERRUPTION_BYTES)
        super().__init__(index, interruptions)
        self.connection, theirs = Pipe()
        self.life, their_life = Pipe()
        self.pipes = [self.connection, self.life]
        with theirs, their_life:
            self.process = _started(theirs, their_life, interruptions.name)
        self.pid: int = self.process.pid
        self._outbox = _Outbox(self.connection)
        self._outbox.put((Surroundings.here(), program))
        weakref.finalize(self, _let_go, self.process, self.life, self._owner).atexit = False

    @override
    def receive(self) -> Any:
        try:
            if not self.connection.poll():
                return NOTHING
            data = self.connection.recv_bytes()
        except (EOFError, OSError):
            return ENDED
        return pickle.loads(data)

    @override
    def post(self, content: Any, memory: NamedMemory | None = None) -> None:
        # A copy of the worker in a forked process does not own it.
        if self._owner == os.getpid():
            self._outbox.put((content, None if memory is None else memory.name))

    @override
    def stop(self) -> None:
        self.told_to_stop = True
        self.post(("stop",))
        if self._owner == os.getpid():
            _abort(self.process, self.life)

    @override
    def kill(self) -> None:
        if self._owner == os.getpid():
            self.process.kill()

    def close(self) -> int:
        """Releases the resources of a process that has ended; returns its exit status."""
        status: int = self.process.wait()
        self._outbox.close()
        self.life.close()
        self._shared.clear()
        return status


class _Outbox:
    """Sends messages in a thread of its own: a pipe may have no room while the worker is busy."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="trawl outbox", daemon=True)
        self._thread.start()

    def put(self, content: Any) -> None:
        """Sends a message; raises any error of pickling."""
        self._queue.put(pickle.dumps(content, pickle.HIGHEST_PROTOCOL))

    def close(self) -> None:
        """Drops what has not been sent. The other side must have ended."""
        self._queue.put(None)
        # A process that the worker forked may hold the pipe open, and reads nothing.
        self._thread.join(_LOOK)
        if not self._thread.is_alive():
            self._connection.close()

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):
            while (data := self._queue.get()) is not None:
                self._connection.send_bytes(data)


def _let_go(process: Any, life: Connection, owner: int) -> None:
    """Ends a worker of which nothing is left here, after it has closed its service."""
    if owner == os.getpid() and process.poll() is None:
        _abort(process, life)
        threading.Thread(target=_close_later, args=(process, life), daemon=True).start()


def _close_later(process: Any, life: Connection) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_CLOSING)
    life.close()
    process.wait()


def _abort(process: Any, life: Connection) -> None:
    """Aborts the work of a worker."""
    if not _WINDOWS:
        process.terminate()
        return
    with contextlib.suppress(OSError):
        life.send_bytes(b"stop")


def _started(connection: Connection, life: Connection, number: str) -> Any:
    """Starts the process of a worker, which inherits its ends of two pipes."""
    handles = [connection.fileno(), life.fileno()]
    command = interpreter_command(
        f"from trawl.backends.portable import run; run({handles}, {number!r})"
    )
    options: dict[str, Any]
    if sys.platform == "win32":
        startup = subprocess.STARTUPINFO()
        startup.lpAttributeList = {"handle_list": handles}
        for handle in handles:
            os.set_handle_inheritable(handle, True)
        # Ctrl-C is for the driver alone.
        group = subprocess.CREATE_NEW_PROCESS_GROUP
        options = {"startupinfo": startup, "creationflags": group, "close_fds": True}
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
    # Ctrl-C would end the worker while it starts.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=handles)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


# --- in the worker


def run(handles: Sequence[int], number: str) -> NoReturn:
    """Runs a worker to its end, and then ends this process.

    Args:
        handles: handles of its ends of the pipes for messages and for the other side's end.
        number: name of the memory to which the driver writes interruptions.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not _WINDOWS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for handle in handles:
            os.set_inheritable(handle, False)
    connection, life = (_pipe(handle) for handle in handles)
    port = _Port(connection, NamedMemory(number, INTERRUPTION_BYTES))
    with port.stoppable():
        _end_with(life)
        failure = port.run()
        if failure is not None:
            with contextlib.suppress(Stopped):
                port.send_event("failed", failure)
        leave(0 if failure is None else 1)


def _pipe(handle: int) -> Connection:
    if sys.platform == "win32":
        from multiprocessing.connection import PipeConnection

        return PipeConnection(handle)
    return Connection(handle)


def _end_with(life: Connection) -> None:
    """Has this process end when the driver does."""
    if sys.platform == "win32":
        threading.Thread(target=_watch, args=(life,), daemon=True).start()
        return
    # By a signal of the system, which needs no thread: this process's code may let no other run.
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if life.poll():
        os._exit(1)


def _watch(life: Connection) -> None:
    """Aborts this process's work when the driver asks for it; ends it if the driver is gone."""
    try:
        while True:
            life.recv_bytes()
            _thread.interrupt_main(signal.SIGTERM)
    except (EOFError, OSError):
        os._exit(1)


class _Port(LocalPort):
    def __init__(self, connection: Connection, number: NamedMemory) -> None:
        super().__init__(number.buffer)
        self._held, self._connection = number, connection
        # A signal alone does not end a wait for messages.
        self._bell, ringer = Pipe(duplex=False)
        self._breaker.wake = lambda: ringer.send_bytes(b"")

    @override
    def make_service(self) -> Service:
        surroundings, program = pickle.loads(self._connection.recv_bytes())
        surroundings.restore()
        service: Service = pickle.loads(program)(self)
        return service

    @override
    def _wait(self, timeout: float | None) -> Any:
        return wait([self._connection, self._bell], timeout)

    @override
    def _receive(self) -> tuple[Any, str | None]:
        try:
            data = self._connection.recv_bytes()
        except (EOFError, ConnectionError):
            raise Stopped from None
        message: tuple[Any, str | None] = pickle.loads(data)
        return message

    @override
    def _opened(self, access: str, nbytes: int) -> NamedMemory:
        return NamedMemory(access, nbytes)

    @override
    def _transmit(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            self._connection.send_bytes(data)
        except ConnectionError:
            raise Stopped from None

    @override
    def send(self, content: Any) -> None:
        # Half a message would make no sense to the driver.
        with self.undisturbed():
            super().send(content)

    @override
    def memory(self, name: int) -> memoryview:
        file, offset, nbytes = self._memory[name]
        return memoryview(file.buffer[offset : offset + nbytes])


# --- memory


class NamedMemory:
    """Shared memory that processes find by its name.

    Args:
        name: name of existing memory; None for new memory.
        nbytes: size of the memory in bytes.
    """

    # Memory of which there were views when its object was freed. It stays mapped as long as they.
    _left: list[_Segment] = []  # noqa: RUF012 - of all instances

    def __init__(self, name: str | None, nbytes: int) -> None:
        if name is None:
            segment = _Segment(create=True, size=max(nbytes, 1))
        else:
            with _not_tracked():
                segment = _Segment(name)
        self.name, self.nbytes = segment.name, nbytes
        assert segment.buf is not None
        # An array, because torch forgets that it has a view of a memoryview.
        self._views = [np.frombuffer(segment.buf, np.uint8, max(nbytes, 1))]
        owner = os.getpid() if name is None else None
        weakref.finalize(self, self._release, segment, self._views, owner)

    @classmethod
    def new(cls, nbytes: int) -> NamedMemory:
        """Allocates new memory, whose name is gone once this object is freed."""
        return cls(None, nbytes)

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """The memory, initially filled with zeros."""
        return self._views[0]

    def reserve(self, start: int, nbytes: int) -> None:
        """Does nothing: the system takes the memory when it is written."""

    @classmethod
    def _release(cls, segment: _Segment, views: list[Any], owner: int | None) -> None:
        if owner == os.getpid():
            with contextlib.suppress(FileNotFoundError):
                segment.unlink()
        views.clear()
        cls._left[:] = [one for one in (*cls._left, segment) if not one.closed()]


class _Segment(SharedMemory):
    """Memory that stays mapped while there are views of it."""

    def closed(self) -> bool:
        """Closes it if there are no views; returns True if it is closed."""
        try:
            super().close()
        except BufferError:
            return False
        return True

    @override
    def close(self) -> None:
        self.closed()


@contextlib.contextmanager
def _not_tracked() -> Iterator[None]:
    """Context in which memory is found without becoming this process's own.

    Otherwise, its name would be removed when this process ends.
    """
    before = resource_tracker.register
    resource_tracker.register = lambda *_: None
    try:
        yield
    finally:
        resource_tracker.register = before
