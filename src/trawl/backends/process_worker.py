"""Code that runs in the process of a local worker."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
from typing_extensions import override

from trawl.backends.base import Port, Service
from trawl.backends.failure import Failure
from trawl.backends.memory import map_once
from trawl.backends.parcel import unpack
from trawl.backends.title import set_title
from trawl.backends.wire import Closed, Wire
from trawl.lean import import_lean

BOARD_BYTES = 64


class _Stop(BaseException):
    """Raised in a worker that is told to end."""


def run(wire: int, board: int) -> NoReturn:
    """Runs a worker, and ends this process after it.

    Args:
        wire: descriptor of the socket to the parent, the process that launched the worker.
        board: descriptor of the memory to which the parent writes interruptions.
    """
    port = _ProcessPort(Wire(socket.socket(fileno=wire)), map_once(board, BOARD_BYTES))
    status = 0
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _stop)
        _work(port)
    except (Closed, _Stop):
        pass
    except BaseException as error:
        status = 1
        port.tell("failed", Failure.of(error))
    finally:
        for stream in (sys.stdout, sys.stderr):
            # The stream may be closed, or nobody may read it any more.
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


# True once the worker is ending. (It would not do to ignore the signal from then on: Python prints
# an error if one comes at that very moment.)
_ending = False
# True while the worker may not be broken off, and true if it was told to end meanwhile. Blocking
# the signal is not enough: another thread receives it then, and Python still runs the handler in
# the main thread.
_undisturbed = _late = False


def _stop(signum: int, frame: Any) -> None:
    global _ending, _late
    if _undisturbed:
        _late = True
    elif not _ending:
        _ending = True
        raise _Stop


def _work(port: _ProcessPort) -> None:
    global _ending
    import_lean()
    service = port.first()(port)
    try:
        try:
            while True:
                while port.waiting(None if not service.busy else 0):
                    port.take(service)
                service.work()
        finally:
            # Closing the service must not be broken off. This line may be, but only once.
            _ending = True
    finally:
        service.close()


class _ProcessPort(Port):
    def __init__(self, wire: Wire, board: mmap.mmap) -> None:
        self._pid = os.getpid()
        self._wire = wire
        self._board = np.frombuffer(board, dtype=np.int64)
        self._files: dict[int, mmap.mmap] = {}
        self._memory: dict[int, memoryview] = {}
        self._poll = select.poll()
        self._poll.register(wire, select.POLLIN)

    def first(self) -> Any:
        """Receives the first message, sets up the process, and returns the service's factory."""
        (index, path, environ, directory, arguments, data), fds = self._wire.receive()
        set_title(f"trawl worker {index}")
        sys.path[:] = path
        sys.argv[:] = arguments
        os.environ.clear()
        os.environ.update(environ)
        if directory is not None:
            # The parent may be in a directory that the user may not enter (again).
            with contextlib.suppress(OSError):
                os.chdir(directory)
        return unpack(data, fds)

    def waiting(self, timeout: float | None) -> bool:
        """Waits up to ``timeout`` ms (None: no limit) for a message; tells whether there is one."""
        return bool(self._poll.poll(timeout))

    def take(self, service: Service) -> None:
        """Receives a message, and acts on it."""
        (verb, *content), fds = self._wire.receive()
        if verb == "share":
            name, (file, size, offset, nbytes) = content
            if fds:
                self._files[file] = _not_in_copies(map_once(fds[0], size))
            self._memory[name] = memoryview(self._files[file])[offset : offset + nbytes]
        elif verb == "forget":
            name, file = content
            self._memory.pop(name, None)
            self._files.pop(file, None)
        elif verb == "stop":
            # The signal stops the worker, too, but any code may have caught its exception.
            raise _Stop
        else:
            service.handle(content[0])

    def tell(self, verb: str, content: Any) -> None:
        """Sends a message; ends the worker if the parent is gone."""
        if os.getpid() != self._pid:
            # An environment forked, and the copy of this process goes on as if it were the worker.
            os._exit(1)
        try:
            self._wire.send((verb, content))
        except Closed:
            raise _Stop from None

    @override
    def send(self, content: Any) -> None:
        self.tell("message", content)

    @override
    def memory(self, name: int) -> memoryview:
        return self._memory[name]

    @override
    def interrupted(self) -> int:
        return int(self._board[0])

    @override
    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        global _undisturbed
        _undisturbed = True
        try:
            yield
        finally:
            _undisturbed = False
        if _late:
            _stop(signal.SIGTERM, None)


def _not_in_copies(memory: mmap.mmap) -> mmap.mmap:
    """Keeps processes that this one forks from inheriting memory.

    A forked copy of the worker that goes on collecting would write into the worker's batches.
    Without the memory, it ends with a segmentation fault instead.
    """
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return memory
