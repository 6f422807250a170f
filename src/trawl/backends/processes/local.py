"""Parts that backends with local processes have in common, whatever carries their messages."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.backends.base import Event, Failed, Message, OwningBackend, Worker
from trawl.backends.blocks import BlockAllocator, NewMemory, SharedBlock
from trawl.backends.failure import Failure
from trawl.backends.processes.loop import NOTHING, Breaker, Stopped, WorkerLoop

#: Returned in place of a message if no more will come.
ENDED = object()
#: Bytes of the memory that has the number with which a worker's work is interrupted.
INTERRUPTION_BYTES = 64


class LocalBackend(OwningBackend):
    """Base class of backends whose workers are processes that share memory with this one.

    Args:
        new: function that allocates shared memory.
    """

    shares_memory = True

    def __init__(self, new: NewMemory) -> None:
        super().__init__()
        # Events stay here if an exception, such as KeyboardInterrupt, ends the wait for more.
        self._events: list[Event] = []
        self._blocks = BlockAllocator(new)

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

    @abstractmethod
    def _receive_all(self, timeout: float | None) -> None:
        """Waits until something comes, or for some seconds, and queues the events."""

    @abstractmethod
    def _forget_connection(self, worker: Any) -> None:
        """Waits no longer for messages of a worker, because no more will come."""

    def _receive(self, worker: Any) -> bool:
        """Receives a message if there is one; returns True if there may be more."""
        try:
            message = worker.receive()
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
        if message is NOTHING:
            return False
        if message is ENDED:
            self._forget_connection(worker)
            return False
        verb, content = message
        kind = Failed if verb == "failed" else Message
        self._events.append(kind(worker, content))
        return True

    @override
    def allocate(self, nbytes: int) -> SharedBlock:
        return self._blocks.allocate(nbytes)


class LocalWorker(Worker):
    """Base class of workers of such backends.

    Args:
        index: number of the worker.
        interruptions: memory of the number that interrupts its work.

    Attributes:
        told_to_stop: True if :meth:`stop` was called.
    """

    def __init__(self, index: int, interruptions: Any) -> None:
        self.index = index
        self.told_to_stop = False
        # Blocks that are shared with the worker by name, each with the number of its file, and the
        # count of these blocks in each file. A block that is kept here keeps its slot.
        self._shared: dict[int, tuple[int, NDArray[np.uint8]]] = {}
        self._blocks_of: Counter[int] = Counter()
        self._interruptions = interruptions
        self._number = np.frombuffer(interruptions.buffer, dtype=np.int64)
        self._owner = os.getpid()

    @abstractmethod
    def receive(self) -> Any:
        """Returns the next message, a verb and its content; or ``NOTHING``, or ``ENDED``."""

    @abstractmethod
    def post(self, content: Any, memory: Any = None) -> None:
        """Sends a message without waiting, with access to shared memory if there is some."""

    @override
    def send(self, content: Any) -> None:
        self.post(("message", content))

    @override
    def share(self, name: int, memory: SharedBlock) -> None:
        self.forget(name)
        file = memory.file
        new = None if self._blocks_of[file.number] else file.memory
        place = (file.number, file.memory.nbytes, memory.offset, memory.buffer.nbytes)
        self.post(("share", name, place), new)
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
        self._number[0] = number


class LocalPort(WorkerLoop):
    """Base class of the loop in such a worker.

    Args:
        interruptions: memory to which the driver writes the number that interrupts the work.
    """

    def __init__(self, interruptions: Any) -> None:
        super().__init__(Breaker())
        self._pid = os.getpid()
        self._interruptions = np.frombuffer(interruptions, dtype=np.int64)
        self._files: dict[int, Any] = {}
        # By name, the file that contains a piece of memory, its offset there and its size.
        self._memory: dict[int, tuple[Any, int, int]] = {}

    @abstractmethod
    def _wait(self, timeout: float | None) -> Any:
        """Waits for a message or a signal; returns a true value if one came."""

    @abstractmethod
    def _receive(self) -> tuple[Any, Any]:
        """Returns the next message, and the access to shared memory that came with it.

        Raises:
            Stopped: if no more messages will come.
        """

    @abstractmethod
    def _opened(self, access: Any, nbytes: int) -> Any:
        """Returns the file to which there is access."""

    @abstractmethod
    def _transmit(self, message: Any) -> None:
        """Sends a message.

        Raises:
            Stopped: if the driver is gone.
        """

    @override
    def next_message(self, wait: bool) -> Any:
        while self._wait(None if wait else 0):
            if self._breaker.stopping:
                raise Stopped
            (verb, *content), access = self._receive()
            if verb == "share":
                name, (file, size, offset, nbytes) = content
                if access:
                    self._files[file] = self._opened(access, size)
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
        """Sends a message; ends the worker if the driver is gone."""
        if os.getpid() != self._pid:
            # An environment forked this process, and the copy goes on as if it were the worker.
            os._exit(1)
        self._transmit((verb, content))

    @override
    def send(self, content: Any) -> None:
        self.send_event("message", content)

    @override
    def interrupted(self) -> int:
        return int(self._interruptions[0])
