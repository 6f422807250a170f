"""Contract of a backend, a place where workers run.

A backend starts workers, carries messages both ways, notices deaths and, where it can, shares
memory. It knows nothing about environments or batches::

    backend = ProcessBackend()
    worker = backend.launch(0, make_service)     # make_service(port) runs in the worker
    worker.send("a question")                    # service.handle("a question")
    for event in backend.wait():                 # the next events, from any worker
        match event:
            case Message(worker, content): ...   # port.send(content)
            case Failed(worker, failure): ...    # the service raised an exception
            case Death(worker, reason): ...      # the worker is gone, for any reason
    backend.close()

In the worker, a :class:`Service` handles the messages one at a time, and only between two pieces
of its own work::

    while not ended:
        while a message has arrived, or service.busy is False (the loop then waits for one):
            service.handle(message)
        service.work()

``tests/backend_conformance.py`` tests all of this for any implementation.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from trawl.backends.failure import Failure
from trawl.backends.processes.payload import Package
from trawl.memory import PrivateMemory


class Port(ABC):
    """Connection of a worker to its driver, the process that launched it."""

    @abstractmethod
    def send(self, content: Any) -> None:
        """Sends a message to the driver.

        After the call returns, the caller may change objects that the message refers to.

        Args:
            content: any object that :mod:`pickle` can serialize. If pickling fails, the exception
                is raised here, and nothing is sent.
        """

    def memory(self, name: int) -> Any:
        """Returns the memory that was shared under ``name``, as a buffer.

        Raises:
            KeyError: if no memory is shared under that name.
        """
        raise KeyError(name)

    def populate(self, name: int, start: int, stop: int) -> None:  # noqa: B027
        """Gets the pages of memory that this worker is about to write, if they are not there yet.

        Args:
            name: name of the memory.
            start: offset of the first byte.
            stop: offset after the last byte. Only this worker may write to these bytes meanwhile.

        Raises:
            MemoryError: if the system has no memory for them.
        """

    @abstractmethod
    def interrupted(self) -> int:
        """Returns the number last passed to :meth:`Worker.interrupt`, or 0. The call is cheap."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Returns a context within which :meth:`Worker.stop` does not abort the work."""
        return nullcontext()


@dataclass(frozen=True)
class HandleCall:
    """Method call by a holder of the worker's handle, if the backend has handles.

    The service receives the call through :meth:`Service.handle`, like a message, and sets the
    answer.

    Attributes:
        name: name of the method.
        args: positional arguments.
        kwargs: keyword arguments.
        answer: future for the pickled result or the exception.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    answer: Future[bytes]


class Service(ABC):
    """Object in a worker that handles messages and does the work."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True if there is work to do. Otherwise the worker waits for a message."""

    @abstractmethod
    def handle(self, content: Any) -> None:
        """Handles a message."""

    @abstractmethod
    def work(self) -> None:
        """Does one piece of work. Called while :attr:`busy` is True."""

    @abstractmethod
    def close(self) -> None:
        """Releases all resources. Called once, when the worker ends, unless it is killed."""


MakeService = Callable[[Port], Service]


class Worker(ABC):
    """Worker, as seen by its driver, the process that launched it.

    Attributes:
        index: number of the worker, from 0.
    """

    index: int

    @abstractmethod
    def send(self, content: Any) -> None:
        """Sends a message, without waiting for the worker to receive it.

        If the worker is dead, nothing happens. Its death is reported as an event.

        Args:
            content: any object that :mod:`pickle` can serialize. If pickling fails, the exception
                is raised here, and nothing is sent.
        """

    def share(self, name: int, memory: Any) -> None:  # noqa: B027
        """Gives the worker access to memory of this backend, under a name.

        The access ends when :meth:`forget` is called. If the backend does not share memory, nothing
        happens.
        """

    def forget(self, name: int) -> None:  # noqa: B027
        """Removes a name that :meth:`share` gave to memory.

        The worker releases the memory when nothing in the worker uses it any more.
        """

    @abstractmethod
    def interrupt(self, number: int) -> None:
        """Sets the number that :meth:`Port.interrupted` returns, even while the worker is busy."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the worker: aborts its work and closes its service. A :class:`Death` follows.

        If the service raises an exception meanwhile, a :class:`Failed` event reports it, as usual.
        """

    @abstractmethod
    def kill(self) -> None:
        """Ends the worker at once, without closing its service. A :class:`Death` follows."""


@dataclass(frozen=True)
class Message:
    """Event: a worker sent a message."""

    worker: Worker
    content: Any


@dataclass(frozen=True)
class Answer:
    """Answer of a service to a request; each request gets one, also if it fails.

    Attributes:
        number: number of the request.
        value: the result, if the request did not fail.
        failure: the exception that the request raised; None if it has a result.
    """

    number: int
    value: Any = None
    failure: Failure | None = None

    def result(self, where: str) -> Any:
        """Returns the result.

        Args:
            where: the place of the service, such as ``"worker 3"``.

        Raises:
            WorkerError: if the request failed.
        """
        if self.failure is not None:
            raise self.failure.error(where)
        return self.value


@dataclass(frozen=True)
class Failed:
    """Event: a service raised an exception, or sent an unreadable message. A death follows."""

    worker: Worker
    failure: Failure


@dataclass(frozen=True)
class Death:
    """Event: a worker is gone. This is its last event.

    Attributes:
        reason: the cause, worded to follow the worker's name in a sentence, such as
            ``"was killed by SIGKILL"``.
        expected: True if the worker was told to stop, and then ended without an error.
    """

    worker: Worker
    reason: str
    expected: bool = False


Event = Message | Failed | Death


class Backend(ABC):
    """Place where workers run.

    Attributes:
        shares_memory: True if workers can write to the memory that :meth:`allocate` returns.
        sends_descriptors: True if workers can be sent objects that have file descriptors, such as
            those of :mod:`multiprocessing`.
        isolated: True if each worker has its own Python interpreter.
    """

    shares_memory: bool
    sends_descriptors = False
    isolated: bool
    _closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this backend is closed: make another one")

    @abstractmethod
    def launch(self, index: int, make: MakeService) -> Worker:
        """Starts a worker, which makes its service by calling ``make`` (pickled if necessary).

        The call does not wait for the service. Messages may be sent at once; the worker handles
        them after it has made the service.

        Raises:
            RuntimeError: if no worker can be started, or the backend is closed.
        """

    def pack(self, parts: Sequence[Any], copied: Sequence[int] = ()) -> Iterable[Any]:
        """Pickles objects as they are now, for the specifications of a worker and replacements.

        Args:
            parts: the objects. What several of them refer to is one object in the worker, too.
            copied: positions of parts that are copied in any case: if a worker is in this process,
                and for modules also if their tensors are in shared memory.

        Returns:
            An iterable that can be sent to a worker, and unpickles one part after the other.

        Raises:
            Exception: any error of pickling, if an object can't be sent.
        """
        return Package(parts, copied)

    @abstractmethod
    def wait(self, timeout: float | None = None) -> list[Event]:
        """Waits until there are events from any worker, and returns them.

        The messages of a worker come in the order in which they were sent. Its death comes last.

        Args:
            timeout: seconds after which an empty list is returned; None for no limit.

        Raises:
            RuntimeError: if no event can come, and there is no timeout.
        """

    def fileno(self) -> int | None:
        """Returns a descriptor that is readable while :meth:`wait` would return at once.

        Returns:
            The descriptor; None if the backend has none.
        """
        return None

    def allocate(self, nbytes: int) -> Any:
        """Allocates memory that can be shared with workers; returns an object with a ``buffer``.

        The memory has no name, and is freed when nothing refers to it any more. If the backend
        does not share memory, workers have no access to it.
        """
        return PrivateMemory(nbytes)

    @abstractmethod
    def close(self) -> None:
        """Kills all workers and releases all resources.

        Afterwards, no method other than :meth:`close` may be called.
        """


class OwningBackend(Backend):
    """Base class of backends whose workers are processes, which this process owns."""

    isolated = True

    def __init__(self) -> None:
        self._living: set[Any] = set()
        self._owner = os.getpid()

    @override
    def close(self) -> None:
        if self._owner != os.getpid():
            # This is a copy of the backend in a forked process, which does not own the workers.
            return
        first, self._closed = not self._closed, True
        for worker in list(self._living):
            worker.kill()
        self._end(first)

    @abstractmethod
    def _end(self, first: bool) -> None:
        """Waits for the ends of the workers, which are killed, and releases all resources.

        Args:
            first: True in the first call of :meth:`close`, which may have been interrupted.
        """
