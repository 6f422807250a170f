"""Code that runs in the process of a local worker."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
from functools import partial
from typing import Any, NoReturn

from typing_extensions import override

from trawl.backends.base import Service
from trawl.backends.ipc import Closed, IpcConnection
from trawl.backends.memory import map_once, populate
from trawl.backends.processes.local import INTERRUPTION_BYTES, LocalPort
from trawl.backends.processes.loop import Stopped, leave
from trawl.backends.processes.payload import unpack
from trawl.backends.processes.title import set_title


def run(connection: int, interruptions: int) -> NoReturn:
    """Runs a worker to its end, and then ends this process.

    Args:
        connection: descriptor of the socket to the parent, the process that launched the worker.
        interruptions: descriptor of the memory to which the parent writes interruptions.
    """
    port = _ProcessPort(
        IpcConnection(socket.socket(fileno=connection)), map_once(interruptions, INTERRUPTION_BYTES)
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with port.stoppable():
        failure = port.run()
        if failure is not None:
            with contextlib.suppress(Stopped):
                port.send_event("failed", failure)
        leave(0 if failure is None else 1)


class _ProcessPort(LocalPort):
    def __init__(self, connection: IpcConnection, interruptions: mmap.mmap) -> None:
        super().__init__(interruptions)
        self._connection = connection
        # A signal alone does not end a wait for messages.
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._breaker.wake = partial(os.eventfd_write, self._bell, 1)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)

    @override
    def make_service(self) -> Service:
        (surroundings, index, data), fds = self._connection.receive()
        set_title(f"trawl worker {index}")
        surroundings.restore()
        service: Service = unpack(data, fds)(self)
        return service

    @override
    def _wait(self, timeout: float | None) -> Any:
        return self._poll.poll(timeout)

    @override
    def _receive(self) -> tuple[Any, list[int]]:
        try:
            return self._connection.receive()
        except Closed:
            raise Stopped from None

    @override
    def _opened(self, access: list[int], nbytes: int) -> mmap.mmap:
        return _not_in_copies(map_once(access[0], nbytes))

    @override
    def _transmit(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except Closed:
            raise Stopped from None

    @override
    def memory(self, name: int) -> memoryview:
        file, offset, nbytes = self._memory[name]
        return memoryview(file)[offset : offset + nbytes]

    @override
    def populate(self, name: int, start: int, stop: int) -> None:
        file, offset, _ = self._memory[name]
        populate(file, offset + start, offset + stop)


def _not_in_copies(memory: mmap.mmap) -> mmap.mmap:
    """Prevents forked copies of this process from inheriting memory.

    A forked copy of the worker that goes on collecting would write into the worker's batches.
    Without the memory, the copy ends with a segmentation fault instead.
    """
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return memory
