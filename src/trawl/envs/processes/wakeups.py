"""Wake-ups between processes with environments and their owner."""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from multiprocessing.reduction import DupFd
from typing import Any

from typing_extensions import override

from trawl.backends.base import Worker
from trawl.envs.processes.spin import Spin

# What wakes a process: a step to take, or a message to read.
STEP, MESSAGE = b"s", b"m"


class WakeupHandles:
    """File descriptors with which a process and its owner wake each other.

    Args:
        steps: pipe from which the process reads a byte when there is work.
        answers: eventfd to which the process writes when it has finished a step.
    """

    def __init__(self, steps: int, answers: int) -> None:
        self.steps = steps
        self.answers = answers

    def duplicate(self) -> WakeupHandles:
        """Returns duplicates of the descriptors, for a thread, which closes them itself."""
        return WakeupHandles(os.dup(self.steps), os.dup(self.answers))

    def close(self) -> None:
        """Closes the descriptors."""
        os.close(self.steps)
        os.close(self.answers)

    def __reduce__(self) -> Any:
        """Passes the descriptors to the process that is being started."""
        return _wakeups, (DupFd(self.steps), DupFd(self.answers))


def _wakeups(steps: Any, answers: Any) -> WakeupHandles:
    return WakeupHandles(steps.detach(), answers.detach())


class Wakeups(ABC):
    """The owner's side.

    Args:
        count: number of processes.

    Attributes:
        wakers: for each process, a function that wakes it. It may raise a ``BrokenPipeError`` if
            the process is dead.
    """

    def __init__(self, count: int) -> None:
        self.wakers: list[Callable[[bytes], object]] = [lambda _: None] * count

    @abstractmethod
    def handles(self, index: int) -> AbstractContextManager[WakeupHandles | None]:
        """Returns a context in which a process is launched, with its side of the wake-ups.

        Without a side of its own, a process is woken by messages, and answers with ``STEP``.
        """

    @abstractmethod
    def launched(self, index: int, worker: Worker) -> None:
        """Takes note of a process that was launched."""

    @abstractmethod
    def wait(self, timeout: float | None) -> bool:
        """Waits until a process answers, and returns True if there may be messages."""

    def close(self) -> None:  # noqa: B027 (messages need no resources)
        """Releases all resources."""


class EventWakeups(Wakeups):
    """Wakes processes through a pipe for each of them, and the owner through an eventfd.

    Args:
        count: number of processes.
        isolated: False if they are threads of this process.
        messages: descriptor that is readable while there are messages.
        spins: True to spin for a moment before each wait.
    """

    def __init__(self, count: int, isolated: bool, messages: int, spins: bool) -> None:
        super().__init__(count)
        self._isolated = isolated
        self._pipes: list[int] = [-1] * count
        self._answers = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Edge-triggered: each write to the eventfd is an edge, so the eventfd need not be read.
        self._poll = select.epoll()
        self._poll.register(self._answers, select.EPOLLIN | select.EPOLLET)
        self._poll.register(messages, select.EPOLLIN)
        self._spin = Spin(self._poll.poll) if spins else list

    @override
    @contextmanager
    def handles(self, index: int) -> Iterator[WakeupHandles]:
        theirs, ours = os.pipe()
        before, self._pipes[index] = self._pipes[index], ours
        self.wakers[index] = partial(os.write, ours)
        if before >= 0:
            os.close(before)
        made = WakeupHandles(theirs, self._answers)
        if not self._isolated:
            made = made.duplicate()
        try:
            yield made
        except BaseException:
            if not self._isolated:
                made.close()
            raise
        finally:
            # Only the new process keeps the reading end, so the owner's writes fail once that
            # process is gone.
            os.close(theirs)

    @override
    def launched(self, index: int, worker: Worker) -> None:
        pass

    @override
    def wait(self, timeout: float | None) -> bool:
        answers = self._answers
        for descriptor, _ in (timeout != 0 and self._spin()) or self._poll.poll(timeout):
            if descriptor != answers:
                return True
        return False

    @override
    def close(self) -> None:
        self._poll.close()
        for descriptor in (*self._pipes, self._answers):
            if descriptor >= 0:
                os.close(descriptor)


class MessageWakeups(Wakeups):
    """Wakes processes and the owner by messages of the backend, on any system.

    Args:
        count: number of processes.
        take: function that waits until a message or a wake-up comes, or for some seconds; it
            returns True if there are messages.
    """

    def __init__(self, count: int, take: Callable[[float | None], bool]) -> None:
        super().__init__(count)
        self._take = take

    @override
    def handles(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def launched(self, index: int, worker: Worker) -> None:
        self.wakers[index] = partial(_send, worker)

    @override
    def wait(self, timeout: float | None) -> bool:
        return self._take(timeout)


def _send(worker: Worker, what: bytes) -> None:
    # A message wakes the process by itself.
    if what == STEP:
        worker.send(STEP)
