"""Workers in threads of this process."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from typing_extensions import override

from trawl.backends.base import (
    Backend,
    Death,
    Event,
    Failed,
    MakeService,
    Message,
    Service,
    Worker,
)
from trawl.backends.processes.loop import NOTHING, Stopped, ThreadBreaker, WorkerLoop
from trawl.checks import is_portable
from trawl.memory import PrivateMemory

_STOP = object()


class _Shared(NamedTuple):
    """Message: memory has a name from now on; None if the name is no longer in use."""

    name: int
    buffer: Any


class ThreadBackend(Backend):
    """Backend whose workers are threads of this process.

    Messages are passed as they are, without copies. A thread can be stopped while it runs Python
    code, but not killed: :meth:`Worker.kill` reports its death, and leaves the thread to itself.
    """

    shares_memory = sends_descriptors = True
    isolated = False

    def __init__(self) -> None:
        self._events: SimpleQueue[Event] = SimpleQueue()
        # Elsewhere than on Linux nobody asks for a descriptor.
        self._bell = -1 if is_portable() else os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._living: set[ThreadWorker] = set()

    @override
    def launch(self, index: int, make: MakeService) -> ThreadWorker:
        self._check_open()
        worker = ThreadWorker(index, make, self)
        with self._lock:
            self._living.add(worker)
        worker.thread.start()
        return worker

    @override
    def wait(self, timeout: float | None = None) -> list[Event]:
        self._check_open()
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._bell >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        if timeout is None and self._events.empty() and not self._living:
            raise RuntimeError("there is no worker to wait for")
        events: list[Event] = []
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            events.append(self._events.get(left != 0, left))
            while True:
                events.append(self._events.get_nowait())
        except Empty:
            return events

    @override
    def fileno(self) -> int | None:
        return self._bell if self._bell >= 0 else None

    def report(self, worker: ThreadWorker, event: Event) -> None:
        """Queues an event of a worker, unless its death has been reported."""
        with self._lock:
            if worker not in self._living:
                return
            if isinstance(event, Death):
                self._living.discard(worker)
            self._events.put(event)
            # A thread that was killed may outlive the backend, but reports nothing.
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    @override
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._lock:
            living = list(self._living)
        for worker in living:
            worker.stop()
            worker.kill()
        with self._lock:
            if self._bell >= 0:
                os.close(self._bell)


class ThreadWorker(Worker):
    """Worker in a thread of this process.

    Attributes:
        thread: the thread.
    """

    def __init__(self, index: int, make: MakeService, backend: ThreadBackend) -> None:
        self.index = index
        self._backend = backend
        self._told_to_stop = False
        self.thread = threading.Thread(target=self._run, name=f"trawl worker {index}", daemon=True)
        self._port = _ThreadPort(self, make, backend, ThreadBreaker(self.thread))

    def _run(self) -> None:
        failure = self._port.run()
        if failure is not None:
            self._backend.report(self, Failed(self, failure))
        reason = f"ended with status {0 if failure is None else 1}"
        self._backend.report(self, Death(self, reason, self._told_to_stop and failure is None))

    @override
    def send(self, content: Any) -> None:
        self._port.messages.put(content)

    @override
    def share(self, name: int, memory: PrivateMemory) -> None:
        self._port.messages.put(_Shared(name, memory.buffer))

    @override
    def forget(self, name: int) -> None:
        self._port.messages.put(_Shared(name, None))

    @override
    def interrupt(self, number: int) -> None:
        self._port.number = number

    @override
    def stop(self) -> None:
        self._told_to_stop = True
        self._port.messages.put(_STOP)
        self._port.abort()

    @override
    def kill(self) -> None:
        self._backend.report(self, Death(self, "was abandoned"))
        self._port.messages.put(_STOP)


class _ThreadPort(WorkerLoop):
    def __init__(
        self,
        worker: ThreadWorker,
        make: MakeService,
        backend: ThreadBackend,
        breaker: ThreadBreaker,
    ) -> None:
        super().__init__(breaker)
        self._worker, self._make, self._backend = worker, make, backend
        self.messages: SimpleQueue[Any] = SimpleQueue()
        self._shared: dict[int, Any] = {}
        self.number = 0

    def abort(self) -> None:
        """Aborts the service's work."""
        self._breaker.stop()

    @override
    def make_service(self) -> Service:
        return self._make(self)

    @override
    def next_message(self, wait: bool) -> Any:
        while True:
            try:
                message = self.messages.get(wait)
            except Empty:
                return NOTHING
            if message is _STOP:
                raise Stopped
            if not isinstance(message, _Shared):
                return message
            if message.buffer is None:
                self._shared.pop(message.name, None)
            else:
                self._shared[message.name] = message.buffer

    @override
    def send(self, content: Any) -> None:
        self._backend.report(self._worker, Message(self._worker, content))

    @override
    def memory(self, name: int) -> Any:
        return self._shared[name]

    @override
    def interrupted(self) -> int:
        return self.number
