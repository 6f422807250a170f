"""Workers in this process, for tests and debugging: they work while the driver waits."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import cloudpickle
from typing_extensions import override

from trawl.backends.base import (
    Backend,
    Death,
    Event,
    Failed,
    MakeService,
    Message,
    Port,
    Service,
    Worker,
)
from trawl.backends.failure import Failure
from trawl.backends.processes.payload import Package
from trawl.memory import PrivateMemory


class InlineBackend(Backend):
    """Backend whose workers are objects in this process.

    A worker makes its service when it is launched, and handles each message when the message is
    sent. While :meth:`wait` waits, the workers take turns, each with one piece of work at a time.

    Args:
        shares_memory: whether workers may use memory of the backend. If not, messages from workers
            are copied, as they are with remote workers.
    """

    isolated = False

    def __init__(self, shares_memory: bool = True) -> None:
        self.shares_memory = self.sends_descriptors = shares_memory
        self._workers: dict[InlineWorker, None] = {}
        self._events: deque[Event] = deque()

    @override
    def launch(self, index: int, make: MakeService) -> InlineWorker:
        self._check_open()
        worker = InlineWorker(index, self)
        self._workers[worker] = None
        worker.begin(make)
        return worker

    @override
    def pack(self, parts: Sequence[Any], copied: Sequence[int] = ()) -> Iterable[Any]:
        return _Parts([Package([part]) if n in copied else [part] for n, part in enumerate(parts)])

    @override
    def wait(self, timeout: float | None = None) -> list[Event]:
        while not self._events:
            busy = [worker for worker in self._workers if worker.busy]
            if not busy:
                if timeout is None:
                    raise RuntimeError("there is nothing to wait for: no worker has work to do")
                return []
            for worker in busy:
                worker.work()
        events = list(self._events)
        self._events.clear()
        return events

    @override
    def close(self) -> None:
        for worker in list(self._workers):
            worker.kill()
        self._events.clear()
        self._closed = True

    def report(self, event: Event) -> None:
        """Queues an event of a worker."""
        self._events.append(event)

    def remove(self, worker: InlineWorker, reason: str, expected: bool) -> None:
        """Removes a worker, and queues its :class:`Death` event."""
        if worker in self._workers:
            del self._workers[worker]
            self._events.append(Death(worker, reason, expected))


class _Parts:
    """Parts of a worker's program, of which some are copied anew for each worker."""

    def __init__(self, each: Sequence[Iterable[Any]]) -> None:
        self._each = each

    def __iter__(self) -> Iterator[Any]:
        for one in self._each:
            yield from one


class InlineWorker(Worker):
    """A worker in this process."""

    def __init__(self, index: int, backend: InlineBackend) -> None:
        self.index = index
        self._backend = backend
        self._service: Service | None = None
        self._port = _InlinePort(self, backend)

    @property
    def busy(self) -> bool:
        """True if the worker has work to do."""
        return self._service is not None and self._service.busy

    def begin(self, make: MakeService) -> None:
        """Makes the service."""
        try:
            self._service = make(self._port)
        except (Exception, SystemExit) as error:
            self._fail(error)

    def work(self) -> None:
        """Does a piece of work."""
        self._guarded("work")

    @override
    def send(self, content: Any) -> None:
        self._guarded("handle", content)

    def _guarded(self, name: str, *arguments: Any) -> None:
        if self._service is None:
            return
        try:
            getattr(self._service, name)(*arguments)
        except (Exception, SystemExit) as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        try:
            self._close()
        except (Exception, SystemExit) as another:
            # As in Python, the last exception is reported, with the first as its context.
            error = another
        self._backend.report(Failed(self, Failure.of(error)))
        self._backend.remove(self, "exited with status 1", expected=False)

    @override
    def share(self, name: int, memory: PrivateMemory) -> None:
        self._port.shared[name] = memory.buffer

    @override
    def forget(self, name: int) -> None:
        self._port.shared.pop(name, None)

    @override
    def interrupt(self, number: int) -> None:
        self._port.number = number

    @override
    def stop(self) -> None:
        try:
            self._close()
        except (Exception, SystemExit) as error:
            self._fail(error)
        else:
            self._backend.remove(self, "exited with status 0", expected=True)

    @override
    def kill(self) -> None:
        self._service = None
        self._backend.remove(self, "was killed", expected=False)

    def _close(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.close()


class _InlinePort(Port):
    def __init__(self, worker: InlineWorker, backend: InlineBackend) -> None:
        self._worker = worker
        self._backend = backend
        self.shared: dict[int, bytearray] = {}
        self.number = 0

    @override
    def send(self, content: Any) -> None:
        if not self._backend.shares_memory:
            content = pickle.loads(cloudpickle.dumps(content))
        self._backend.report(Message(self._worker, content))

    @override
    def memory(self, name: int) -> bytearray:
        return self.shared[name]

    @override
    def interrupted(self) -> int:
        return self.number
