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

import numpy as np
from typing_extensions import override

from trawl.backends.base import Service
from trawl.backends.ipc import Closed, IpcConnection
from trawl.backends.memory import map_once, populate
from trawl.backends.processes.loop import NOTHING, Breaker, Stopped, WorkerLoop, leave
from trawl.backends.processes.payload import unpack
from trawl.backends.processes.title import set_title

INTERRUPTION_BYTES = 64


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


class _ProcessPort(WorkerLoop):
    def __init__(self, connection: IpcConnection, interruptions: mmap.mmap) -> None:
        super().__init__(Breaker())
        self._pid = os.getpid()
        self._connection = connection
        self._interruptions = np.frombuffer(interruptions, dtype=np.int64)
        self._files: dict[int, mmap.mmap] = {}
        # By name, the file that contains a piece of memory, its offset there and its size.
        self._memory: dict[int, tuple[mmap.mmap, int, int]] = {}
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
    def next_message(self, wait: bool) -> Any:
        while self._poll.poll(None if wait else 0):
            if self._breaker.stopping:
                raise Stopped
            try:
                (verb, *content), fds = self._connection.receive()
            except Closed:
                raise Stopped from None
            if verb == "share":
                name, (file, size, offset, nbytes) = content
                if fds:
                    self._files[file] = _not_in_copies(map_once(fds[0], size))
                self._memory[name] = self._files[file], offset, nbytes
            elif verb == "forget":
                name, file = content
                self._memory.pop(name, None)
                self._files.pop(file, None)
            elif verb == "stop":
                # The signal also stops the worker, but other code may have caught the exception
                # that the signal raised.
                raise Stopped
            else:
                return content[0]
        return NOTHING

    def send_event(self, verb: str, content: Any) -> None:
        """Sends a message; ends the worker if the parent is gone."""
        if os.getpid() != self._pid:
            # An environment forked this process, and the copy goes on as if it were the worker.
            os._exit(1)
        try:
            self._connection.send((verb, content))
        except Closed:
            raise Stopped from None

    @override
    def send(self, content: Any) -> None:
        self.send_event("message", content)

    @override
    def memory(self, name: int) -> memoryview:
        file, offset, nbytes = self._memory[name]
        return memoryview(file)[offset : offset + nbytes]

    @override
    def populate(self, name: int, start: int, stop: int) -> None:
        file, offset, _ = self._memory[name]
        populate(file, offset + start, offset + stop)

    @override
    def interrupted(self) -> int:
        return int(self._interruptions[0])


def _not_in_copies(memory: mmap.mmap) -> mmap.mmap:
    """Prevents forked copies of this process from inheriting memory.

    A forked copy of the worker that goes on collecting would write into the worker's batches.
    Without the memory, the copy ends with a segmentation fault instead.
    """
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return memory
