"""The contract of a place where workers live.

A backend starts workers, carries messages both ways, notices deaths and, where it can, shares
memory. It knows nothing of environments or batches::

    backend = ProcessBackend()
    worker = backend.launch(0, make_service)     # make_service(port) runs over there
    worker.send("a question")                    # service.handle("a question")
    for event in backend.wait():                 # whatever comes first, of any worker
        match event:
            case Message(worker, content): ...   # port.send(content)
            case Failed(worker, failure): ...    # an exception that the service let through
            case Death(worker, reason): ...      # it is gone, however that came about
    backend.close()

Over there, a :class:`Service` answers. Messages come to it one at a time, and between two pieces
of its work::

    while not ended:
        while messages are there (or service.busy is False, and so there is time to wait):
            service.handle(message)
        service.work()

``trawl.testing.BackendConformance`` tests all of this for any implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from trawl.backends.failure import Failure


class Port(ABC):
    """A worker's connection to the process that it works for."""

    @abstractmethod
    def send(self, content: Any) -> None:
        """Sends a message to the other side.

        Args:
            content: what :mod:`pickle` can take there. An exception that says that it can't is
                raised here, and nothing is sent. What it refers to may change after that.
        """

    @abstractmethod
    def memory(self, name: int) -> Any:
        """The memory that was shared under ``name``, as a buffer.

        Raises:
            KeyError: if there is none.
        """

    @abstractmethod
    def interrupted(self) -> int:
        """The number last given to :meth:`Worker.interrupt`; 0 before. It costs next to nothing."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Keeps :meth:`Worker.stop` from breaking off what is done within, if it would."""
        return nullcontext()


@dataclass(frozen=True)
class Asked:
    """A method call by a holder of the worker's handle, where a backend has handles.

    A service takes it as it takes messages, and sets its answer.

    Attributes:
        name: the method.
        args: positional arguments.
        kwargs: keyword arguments.
        answer: the result, pickled, or the exception.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    answer: Future[bytes]


class Service(ABC):
    """What runs in a worker."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether there is work to do; otherwise the worker waits for a message."""

    @abstractmethod
    def handle(self, content: Any) -> None:
        """Takes a message."""

    @abstractmethod
    def work(self) -> None:
        """Does one piece of work; called while :attr:`busy`."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of everything. It is called once, when the worker ends other than by a kill."""


MakeService = Callable[[Port], Service]


class Worker(ABC):
    """A worker, as seen by the process that it works for.

    Attributes:
        index: its number, from 0.
    """

    index: int

    @abstractmethod
    def send(self, content: Any) -> None:
        """Sends a message, and doesn't wait until it is taken.

        If the worker is dead, nothing happens: its death is an event.

        Args:
            content: what :mod:`pickle` can take there. An exception that says that it can't is
                raised here, and nothing is sent.
        """

    @abstractmethod
    def share(self, name: int, memory: Any) -> None:
        """Lets the worker use memory of this backend, under a name. It stays valid there."""

    @abstractmethod
    def forget(self, name: int) -> None:
        """Takes the name back; the worker's part of that memory is freed with its last user."""

    @abstractmethod
    def interrupt(self, number: int) -> None:
        """Sets what :meth:`Port.interrupted` tells the worker, also while it works."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the worker: what it does is broken off, and its service closed. A death follows.

        An exception that comes of that is a failure, as any other.
        """

    @abstractmethod
    def kill(self) -> None:
        """Ends the worker at once, its service not asked. A death follows."""


@dataclass(frozen=True)
class Message:
    """A worker sent something."""

    worker: Worker
    content: Any


@dataclass(frozen=True)
class Failed:
    """A worker's service raised an exception, or sent what can't be read; its death follows."""

    worker: Worker
    failure: Failure


@dataclass(frozen=True)
class Death:
    """A worker is gone; nothing more comes from it.

    Attributes:
        reason: why, as the end of a sentence: ``"was killed by SIGKILL"``.
        expected: whether it was told to stop, and did.
    """

    worker: Worker
    reason: str
    expected: bool = False


Event = Message | Failed | Death


class Backend(ABC):
    """A place where workers live.

    Attributes:
        shares_memory: whether :meth:`allocate` gives memory that workers can write to.
        isolated: whether each worker has an interpreter of its own.
    """

    shares_memory: bool
    isolated: bool

    @abstractmethod
    def launch(self, index: int, make: MakeService) -> Worker:
        """Starts a worker that makes its service by ``make`` (pickled, if need be).

        It doesn't wait for that: messages may be sent at once, and are handled after.

        Raises:
            RuntimeError: if no worker can be started, or the backend is closed.
        """

    @abstractmethod
    def wait(self, timeout: float | None = None) -> list[Event]:
        """What happened to any worker, as soon as there is something.

        The messages of a worker come in the order in which they were sent, its death last.

        Args:
            timeout: seconds after which an empty list is returned; None waits as long as it takes.

        Raises:
            RuntimeError: if there is nothing that could happen, and no timeout.
        """

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """Memory that can be shared with workers, as an object with a ``buffer``.

        Nothing but references keeps it: it has no name, and is gone with its last user.
        """

    @abstractmethod
    def close(self) -> None:
        """Kills what still lives, and lets go of all. May be called again; nothing else may."""
