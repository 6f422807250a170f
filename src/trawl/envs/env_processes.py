"""Starts and stops processes that run environments, and calls methods in them."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from trawl.backends.base import Death, Event, Failed, Message, Worker
from trawl.backends.process import ProcessBackend
from trawl.backends.spawn_payload import SpawnPayload, unsendable
from trawl.backends.thread import ThreadBackend
from trawl.checks import require_linux
from trawl.envs.attributes import Application, pack
from trawl.envs.env_service import (
    BUFFERS,
    MESSAGE,
    CallFailed,
    CallResult,
    EnvCall,
    EnvInfo,
    EnvServiceFactory,
    WakeupHandles,
)
from trawl.envs.own_process import parent_registry
from trawl.envs.spin import Spin, may_spin
from trawl.envs.step_buffers import SharedStepBuffers, StepBufferSpec
from trawl.errors import WorkerDied, WorkerError

# Seconds that processes have to close their environments before they are killed.
_CLOSING = 5.0


class EnvProcesses:
    """Processes that run environments, and answer calls of methods.

    Args:
        sources: for each environment, a pair of its source and the source's keyword arguments.
        envs_per_worker: number of environments in each process. The last process may have fewer.
        start_method: start method of the processes; None to run the environments in threads of
            this process instead.
        affinity: function that returns the CPU cores of a process, or None for all cores.

    Attributes:
        infos: description of each environment, sent by its process.
        count: number of processes.
        buffers: the shared memory; None until :meth:`attach` is called.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Any, Mapping[str, Any]]],
        envs_per_worker: int,
        start_method: str | None,
        affinity: Callable[[int], Sequence[int] | None] = lambda _: None,
    ) -> None:
        require_linux("environments in other processes or threads")
        self._sources, self._affinity = sources, affinity
        self._each = envs_per_worker
        self.count = -(-len(sources) // envs_per_worker)
        self._backend: ProcessBackend | ThreadBackend = (
            ThreadBackend() if start_method is None else ProcessBackend(start_method)
        )
        self._workers: list[Worker] = []
        self._living: set[int] = set()
        self._wakeups: list[int] = [-1] * self.count
        self._answers = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events: deque[Event] = deque()
        self._results: dict[int, Any] = {}
        self._calls = 0
        self._lost: str | None = None
        self._owner = os.getpid()
        self.closed = False
        self.buffers: SharedStepBuffers | None = None
        self._shared: Any = None
        self._spec: StepBufferSpec | None = None
        # Edge-triggered: each write to the eventfd is an edge, so the eventfd need not be read.
        self._poll = select.epoll()
        self._poll.register(self._answers, select.EPOLLIN | select.EPOLLET)
        self._poll.register(self._backend.fileno(), select.EPOLLIN)
        # A thread must not spin, because the other threads would wait for it.
        self._spins = self._backend.isolated and may_spin(self.count, affinity)
        self._spin = Spin(self._poll.poll) if self._spins else list
        # A thread finds the registry of this process, and must not change its settings.
        self._registry = parent_registry() if self._backend.isolated else None
        try:
            self.infos = self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> list[EnvInfo]:
        for index in range(self.count):
            self._launch(index)
        found: dict[int, tuple[EnvInfo, ...]] = {}
        while len(found) < self.count:
            event = self._next_event()
            if isinstance(event, Message) and isinstance(event.content, tuple):
                found[event.worker.index] = event.content
        return [info for index in sorted(found) for info in found[index]]

    def _launch(self, index: int, seed: int | None = None) -> None:
        """Starts a process, in place of a dead one if there was one.

        Args:
            index: number of the process.
            seed: seed of its global generators while it makes its environments, or None.
        """
        own = [self._sources[env] for env in self.envs_of(index)]
        theirs, ours = os.pipe()
        before, self._wakeups[index] = self._wakeups[index], ours
        if before >= 0:
            os.close(before)
        wakeups = WakeupHandles(theirs, self._answers)
        if not self._backend.isolated:
            wakeups = wakeups.duplicate()
        try:
            first, cores = index * self._each, self._affinity(index)
            factory = EnvServiceFactory(
                index, first, own, wakeups, self._registry, cores, self._spins, seed
            )
            self._workers[index : index + 1] = [self._backend.launch(index, factory)]
        except BaseException:
            if not self._backend.isolated:
                wakeups.close()
            else:
                self._check_sendable(index)
            raise
        finally:
            # Only the new process keeps the reading end, so the owner's writes fail once that
            # process is gone.
            os.close(theirs)
        self._living.add(index)

    def _check_sendable(self, index: int) -> None:
        """Raises a ``TypeError`` if an environment of a process can't be pickled."""
        for env in self.envs_of(index):
            names = ("create_env_fn", "create_env_kwargs")
            for name, part in zip(names, self._sources[env], strict=True):
                try:
                    SpawnPayload(part)
                except Exception as error:
                    raise unsendable(name, f"environment {env}", error) from error

    def attach(self, spec: StepBufferSpec) -> SharedStepBuffers:
        """Allocates the shared memory that steps use from now on."""
        self._shared, self._spec = self._backend.allocate(spec.nbytes), spec
        for worker in self._workers:
            worker.share(BUFFERS, self._shared)
        self.call_all("attach", spec)
        self.buffers = buffers = SharedStepBuffers(spec, self._shared.buffer)
        return buffers

    @property
    def generators(self) -> int:
        """Number of processes that have global random generators of their own."""
        return self.count if self._backend.isolated else 0

    def envs_of(self, worker: int) -> range:
        """Returns the numbers of a process's environments."""
        first = worker * self._each
        return range(first, min(first + self._each, len(self._sources)))

    # --- calls

    def call_all(self, name: str, *args: Any) -> list[Any]:
        """Calls a method of the service in all processes, and returns the results."""
        return self.call_each(name, [args] * self.count)

    def call_each(self, name: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a method of the service in each process with arguments of its own."""
        return self._call([(index, None, name, args) for index, args in enumerate(arguments)])

    def call(self, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls methods of environments.

        Args:
            calls: name of the method and its arguments, by number of the environment.

        Returns:
            The results, by number of the environment.

        Raises:
            WorkerError: if a call raised an exception; the error is also an instance of the
                exception's type.
            WorkerDied: if a process has died.
        """
        sent = [(env // self._each, env, name, args) for env, (name, *args) in calls.items()]
        return dict(zip(calls, self._call(sent), strict=True))

    def apply(self, calls: Mapping[int, Application]) -> dict[int, Any]:
        """Calls functions with environments where these are.

        Args:
            calls: for some environments, by number, a function and its arguments after the
                environment.

        Returns:
            The results, by number of the environment.

        Raises:
            TypeError: if arguments or results can't be pickled.
            WorkerError: if a call raised an exception; the error is also an instance of the
                exception's type.
            WorkerDied: if a process has died.
        """
        if not self._backend.isolated:
            return self.call({env: ("apply", call) for env, call in calls.items()})
        packed = {env: pack(call) for env, call in calls.items()}
        found = self.call({env: ("apply_packed", data) for env, data in packed.items()})
        return {env: cloudpickle.loads(data) for env, data in found.items()}

    def _call(self, calls: Sequence[tuple[int, int | None, str, Sequence[Any]]]) -> list[Any]:
        self._check_running()
        self._results.clear()
        numbers = [self._post(*call) for call in calls]
        while not self._results.keys() >= set(numbers):
            self._handle(self._next_event(), set(numbers))
        return [self._results[number] for number in numbers]

    def _post(self, worker: int, env: int | None, name: str, args: Sequence[Any]) -> int:
        """Sends a call, and returns its number."""
        self._calls += 1
        self._workers[worker].send(EnvCall(self._calls, env, name, args))
        if self.buffers is not None:
            self._wake(worker, MESSAGE)
        return self._calls

    def _handle(self, event: Event, awaited: set[int]) -> None:
        """Handles a message from a process; ignores results whose number is not in ``awaited``."""
        if not isinstance(event, Message) or isinstance(event.content, tuple):
            return
        if event.content.number not in awaited:
            return
        if isinstance(event.content, CallFailed):
            raise self._error(event.content, event.worker.index)
        if isinstance(event.content, CallResult):
            self._results[event.content.number] = event.content.value

    def _next_event(self) -> Event:
        """Waits for the next event.

        Raises:
            WorkerError: if the event is the failure or the death of a process.
        """
        event = self._pop_event()
        index = event.worker.index
        if isinstance(event, Failed):
            self._lost = self._lost or (
                f"{self.name_of(index)} has ended because of {event.failure.summary}"
            )
            raise event.failure.error(self.name_of(index))
        if isinstance(event, Death):
            self._living.discard(index)
            self._lost = self._lost or self._death(event)
            raise WorkerDied(self._lost)
        return event

    def _pop_event(self) -> Event:
        while not self._events:
            self._events.extend(self._backend.wait())
        return self._events.popleft()

    def _death(self, event: Death) -> str:
        return f"{self.name_of(event.worker.index)}: its process {event.reason}"

    def _error(self, failed: CallFailed, worker: int) -> WorkerError:
        name = self.name_of(worker) if failed.env is None else f"environment {failed.env}"
        return failed.failure.error(name)

    def _wake(self, index: int, what: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._wakeups[index], what)

    # --- the end

    def _check_running(self) -> None:
        """Checks that the environments are open, and that no process has died.

        Raises:
            RuntimeError: if the environments are closed.
            WorkerDied: if a process has died.
        """
        if self.closed:
            raise RuntimeError("the environments are already closed")
        if self._lost is not None:
            raise WorkerDied(self._lost)

    def close(self) -> list[Failed]:
        """Ends all processes.

        The processes close their environments. A process that takes too long is killed.

        Returns:
            The failures that the processes reported.
        """
        if self.closed:
            return []
        self.closed, self._shared = True, None
        failures: list[Failed] = []
        if self._owner == os.getpid():
            failures = self._end()
        self._poll.close()
        for descriptor in (*self._wakeups, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        return failures

    def _end(self) -> list[Failed]:
        failures = []
        deadline = time.monotonic() + _CLOSING
        self._living -= {event.worker.index for event in self._events if isinstance(event, Death)}
        try:
            for index in self._living:
                self._workers[index].stop()
                # stop() sends a signal. In case the process catches the signal, it also sends a
                # message, and the wake-up makes the process read this message.
                self._wake(index, MESSAGE)
            while self._living and (left := deadline - time.monotonic()) > 0:
                for event in self._backend.wait(left):
                    if isinstance(event, Death):
                        self._living.discard(event.worker.index)
                    elif isinstance(event, Failed):
                        failures.append(event)
        finally:
            self._backend.close()
        return failures

    def name_of(self, worker: int) -> str:
        """Returns the name of a process's environments."""
        envs = self.envs_of(worker)
        first, last = envs[0], envs[-1]
        return f"environment {first}" if first == last else f"environments {first} to {last}"
