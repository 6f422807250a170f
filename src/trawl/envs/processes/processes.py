"""Starts and stops processes that run environments, and carries messages to and from them."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trawl.backends.base import Death, Event, Failed, Message, Worker
from trawl.backends.failure import Failure
from trawl.backends.places import backend_at
from trawl.backends.processes.payload import SpawnPayload, unsendable
from trawl.backends.thread import ThreadBackend
from trawl.envs.kinds import KINDS
from trawl.envs.processes.own_process import parent_registry
from trawl.envs.processes.service import (
    BUFFERS,
    EnvAnswer,
    EnvCall,
    EnvInfo,
    EnvServiceFactory,
)
from trawl.envs.processes.spin import may_spin
from trawl.envs.processes.wakeups import MESSAGE, EventWakeups, MessageWakeups, Wakeups
from trawl.errors import WorkerDied

# Seconds that processes have to close their environments before they are killed.
_CLOSING = 5.0


class Ended(NamedTuple):
    """The end of a process, in place of a message.

    Attributes:
        error: the error with which it ended.
        summary: text that says why, for later calls.
    """

    error: Exception
    summary: str


class EnvProcesses:
    """Processes that run environments.

    Args:
        sources: for each environment, a pair of its source and the source's keyword arguments.
        envs_per_worker: number of environments in each process. The last process may have fewer.
        start_method: start method of the processes; None to run the environments in threads of
            this process instead.
        affinity: function that returns the CPU cores of a process, or None for all cores.

    Attributes:
        infos: description of each environment, sent by its process.
        count: number of processes.
        isolated: False if they are threads of this process.
        workers: the processes.
        living: numbers of the processes that have not ended.
        wakers: functions that wake them.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Any, Mapping[str, Any]]],
        envs_per_worker: int,
        start_method: str | None,
        affinity: Callable[[int], Sequence[int] | None],
    ) -> None:
        self._sources, self._affinity = sources, affinity
        self.envs_per_worker = envs_per_worker
        self.count = -(-len(sources) // envs_per_worker)
        self._backend = ThreadBackend() if start_method is None else backend_at(start_method)
        self.isolated = self._backend.isolated
        self.workers: list[Worker] = []
        self.living: set[int] = set()
        self._events: deque[Event] = deque()
        # Failures of processes that are about to end, and why others were killed.
        self._failed: dict[int, Failure] = {}
        self._killed: dict[int, str] = {}
        self._calls = 0
        self._owner = os.getpid()
        self._shared: Any = None
        messages = self._backend.fileno()
        # A thread must not spin, because the other threads would wait for it.
        self._spins = messages is not None and self.isolated and may_spin(self.count, affinity)
        self._wakeups: Wakeups
        if messages is None:
            self._wakeups = MessageWakeups(self.count, self._take)
        else:
            self._wakeups = EventWakeups(self.count, self.isolated, messages, self._spins)
        self.wakers = self._wakeups.wakers
        # A thread finds the registry of this process, and must not change its settings.
        self._registry = parent_registry() if self.isolated else None
        try:
            self.infos = self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> list[EnvInfo]:
        for index in range(self.count):
            self.launch(index)
        infos: list[EnvInfo] = []
        # Threads warn by themselves, in the registry of this process.
        with KINDS.warning_for(infos) if self.isolated else contextlib.nullcontext():
            infos += self._receive_infos()
        return infos

    def _receive_infos(self) -> list[EnvInfo]:
        """Returns the descriptions of all environments, when they have been made."""
        found: dict[int, tuple[EnvInfo, ...]] = {}
        while len(found) < self.count:
            received = self.receive()
            assert received is not None
            index, content = received
            if isinstance(content, Ended):
                raise content.error
            found[index] = content
        return [info for index in sorted(found) for info in found[index]]

    def launch(self, index: int, seed: int | None = None) -> None:
        """Starts a process, in place of a dead one if there was one.

        Args:
            index: number of the process.
            seed: seed of its global generators while it makes its environments, or None.
        """
        own = [self._sources[env] for env in self.envs_of(index)]
        first, cores = index * self.envs_per_worker, self._affinity(index)
        try:
            with self._wakeups.handles(index) as wakeups:
                factory = EnvServiceFactory(
                    index, first, own, wakeups, self._registry, cores, self._spins, seed
                )
                self.workers[index : index + 1] = [self._backend.launch(index, factory)]
        except BaseException:
            if self.isolated:
                self._check_sendable(index)
            raise
        self._wakeups.launched(index, self.workers[index])
        self.living.add(index)
        if self._shared is not None:
            self.workers[index].share(BUFFERS, self._shared)

    def _check_sendable(self, index: int) -> None:
        """Raises a ``TypeError`` if an environment of a process can't be pickled."""
        for env in self.envs_of(index):
            names = ("create_env_fn", "create_env_kwargs")
            for name, part in zip(names, self._sources[env], strict=True):
                try:
                    SpawnPayload(part)
                except Exception as error:
                    raise unsendable(name, f"environment {env}", error) from error

    def share(self, nbytes: int) -> Any:
        """Allocates memory that all processes share, those that are started later as well."""
        self._shared = self._backend.allocate(nbytes)
        for worker in self.workers:
            worker.share(BUFFERS, self._shared)
        return self._shared.buffer

    def envs_of(self, worker: int) -> range:
        """Returns the numbers of a process's environments."""
        first = worker * self.envs_per_worker
        return range(first, min(first + self.envs_per_worker, len(self._sources)))

    def name_of(self, worker: int) -> str:
        """Returns the name of a process's environments."""
        envs = self.envs_of(worker)
        first, last = envs[0], envs[-1]
        return f"environment {first}" if first == last else f"environments {first} to {last}"

    # --- messages

    def post(self, index: int, env: int | None, name: str, args: Sequence[Any]) -> int:
        """Calls a method in a process, without waiting for the answer.

        Args:
            index: number of the process.
            env: number of the environment; None for a method of the service.
            name: name of the method.
            args: its arguments.

        Returns:
            The number of the call, which the answer has as well.
        """
        self._calls += 1
        self.workers[index].send(EnvCall(self._calls, env, name, args))
        if self._shared is not None:
            # It may wait for a step.
            self.wake(index, MESSAGE)
        return self._calls

    def wake(self, index: int, what: bytes) -> None:
        """Wakes a process, unless it is dead."""
        with contextlib.suppress(BrokenPipeError):
            self.wakers[index](what)

    def receive(self, timeout: float | None = None) -> tuple[int, Any] | None:
        """Waits for the next message.

        Args:
            timeout: seconds to wait; None for no limit.

        Returns:
            The number of the process, and its message or its end; None if none came in time.
        """
        while True:
            if not self._take(timeout):
                if timeout is None:
                    continue
                return None
            event = self._events.popleft()
            index = event.worker.index
            if isinstance(event, Message):
                return index, event.content
            if isinstance(event, Death):
                return index, self._end_of(event)
            # Its death follows.
            self._failed[index] = event.failure

    def place_of(self, index: int, answer: EnvAnswer) -> str:
        """Returns the place of a failure in a process, for its error."""
        return self.name_of(index) if answer.env is None else f"environment {answer.env}"

    def _end_of(self, event: Death) -> Ended:
        index = event.worker.index
        name = self.name_of(index)
        self.living.discard(index)
        killed, failure = self._killed.pop(index, None), self._failed.pop(index, None)
        if failure is not None:
            return Ended(failure.error(name), f"{name} has ended because of {failure.summary}")
        why = f"{name}: its process {killed or event.reason}"
        return Ended(WorkerDied(why), why)

    def wait(self, timeout: float | None) -> bool:
        """Waits until a process answers, and returns True if there may be messages.

        Args:
            timeout: seconds to wait; None for no limit.
        """
        return self._wakeups.wait(timeout)

    def _take(self, timeout: float | None) -> bool:
        """Waits for messages or a wake-up, and returns True if there are messages."""
        if not self._events:
            # Bytes wake this process, and say nothing.
            self._events.extend(
                event
                for event in self._backend.wait(timeout)
                if not (isinstance(event, Message) and isinstance(event.content, bytes))
            )
        return bool(self._events)

    # --- the end

    def kill(self, index: int, why: str) -> None:
        """Ends a process at once, unless it was killed before.

        Args:
            index: number of the process.
            why: text that follows "its process" in the error.
        """
        if index not in self._killed:
            self._killed[index] = why
            self.workers[index].kill()

    def close(self) -> list[Failed]:
        """Ends all processes.

        The processes close their environments. A process that takes too long is killed.

        Returns:
            The failures that the processes reported.
        """
        self._shared = None
        failures: list[Failed] = []
        if self._owner == os.getpid():
            failures = self._end()
        self._wakeups.close()
        return failures

    def _end(self) -> list[Failed]:
        failures = []
        deadline = time.monotonic() + _CLOSING
        self.living -= {event.worker.index for event in self._events if isinstance(event, Death)}
        try:
            for index in self.living:
                self.workers[index].stop()
                # stop() sends a signal. In case the process catches the signal, it also sends a
                # message, and the wake-up makes the process read this message.
                self.wake(index, MESSAGE)
            left = math.inf
            # The last look comes after the deadline, as this process may have been suspended.
            while self.living and left:
                left = max(0.0, deadline - time.monotonic())
                for event in self._backend.wait(left):
                    if isinstance(event, Death):
                        self.living.discard(event.worker.index)
                    elif isinstance(event, Failed):
                        failures.append(event)
        finally:
            self._backend.close()
        return failures
