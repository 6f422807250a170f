"""Starts, steps and stops the processes of a :class:`~trawl.envs.ParallelEnv`."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from trawl.backends.base import Death, Event, Failed, Message, Worker
from trawl.backends.process import ProcessBackend
from trawl.backends.thread import ThreadBackend
from trawl.envs.env_service import (
    BUFFERS,
    MESSAGE,
    STEP,
    CallFailed,
    CallResult,
    EnvCall,
    EnvInfo,
    EnvServiceFactory,
    WakeupHandles,
)
from trawl.envs.own_process import parent_registry
from trawl.envs.step_buffers import SharedStepBuffers, StepBufferSpec
from trawl.errors import WorkerDied, WorkerError

# Seconds that processes have to close their environments before they are killed.
_CLOSING = 5.0
_BYTE_ORDER: Literal["little", "big"] = sys.byteorder


class EnvWorkers:
    """Processes that run environments, which step together or each at its own pace.

    Each step of a process has a number. When the process has taken the step, it writes the number
    to shared memory, and only this number counts as its answer. A wake-up merely ends the other
    side's wait, and may come more often than needed.

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
        self._each = envs_per_worker
        self._envs = len(sources)
        self.count = -(-self._envs // envs_per_worker)
        self._backend: ProcessBackend | ThreadBackend = (
            ThreadBackend() if start_method is None else ProcessBackend(start_method)
        )
        self._workers: list[Worker] = []
        self._living: set[int] = set()
        self._wakeups: list[int] = []
        self._answers = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events: deque[Event] = deque()
        self._results: dict[int, Any] = {}
        self._calls = 0
        self._lost: str | None = None
        self._owner = os.getpid()
        self.closed = False
        self.buffers: SharedStepBuffers | None = None
        # Number of the last step, and the first process of each group with a step in progress.
        self._step = 0
        self._pending: set[int] = set()
        # Edge-triggered: each write to the eventfd is an edge, so the eventfd need not be read.
        self._poll = select.epoll()
        self._poll.register(self._answers, select.EPOLLIN | select.EPOLLET)
        self._poll.register(self._backend.fileno(), select.EPOLLIN)
        try:
            self.infos = self._start(sources, affinity)
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        sources: Sequence[tuple[Any, Mapping[str, Any]]],
        affinity: Callable[[int], Sequence[int] | None],
    ) -> list[EnvInfo]:
        # A thread finds the registry of this process, and must not change its settings.
        registry = parent_registry() if self._backend.isolated else None
        for index in range(self.count):
            first = index * self._each
            own = sources[first : first + self._each]
            theirs, ours = os.pipe()
            self._wakeups.append(ours)
            try:
                wakeups = WakeupHandles(theirs, self._answers)
                if not self._backend.isolated:
                    wakeups = wakeups.duplicate()
                factory = EnvServiceFactory(index, first, own, wakeups, registry, affinity(index))
                self._workers.append(self._backend.launch(index, factory))
            finally:
                # Only the new process keeps the reading end, so the owner's writes fail once that
                # process is gone.
                os.close(theirs)
            self._living.add(index)
        found: dict[int, tuple[EnvInfo, ...]] = {}
        while len(found) < self.count:
            event = self._next_event()
            if isinstance(event, Message) and isinstance(event.content, tuple):
                found[event.worker.index] = event.content
        return [info for index in sorted(found) for info in found[index]]

    def attach(self, spec: StepBufferSpec) -> SharedStepBuffers:
        """Allocates the shared memory that steps use from now on."""
        memory = self._backend.allocate(spec.nbytes)
        for worker in self._workers:
            worker.share(BUFFERS, memory)
        self.call_all("attach", spec)
        self.buffers = buffers = SharedStepBuffers(spec, memory.buffer)
        return buffers

    # --- calls

    def call_all(self, name: str, *args: Any) -> None:
        """Calls a method of the service in all processes."""
        self._call([(index, None, name, args) for index in range(self.count)])

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

    def _call(self, calls: Sequence[tuple[int, int | None, str, Sequence[Any]]]) -> list[Any]:
        self._check_running()
        if self.step_pending:
            self.finish_step()
        self._results.clear()
        numbers = []
        for worker, env, name, args in calls:
            self._calls += 1
            numbers.append(self._calls)
            self._workers[worker].send(EnvCall(self._calls, env, name, args))
            if self.buffers is not None:
                self._wake(worker, MESSAGE)
        while not self._results.keys() >= set(numbers):
            self._handle(self._next_event(), set(numbers))
        return [self._results[number] for number in numbers]

    def _handle(self, event: Event, awaited: set[int]) -> None:
        """Handles a message from a process; ignores results whose number is not in ``awaited``."""
        if not isinstance(event, Message) or event.content.number not in awaited:
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
        while not self._events:
            self._events.extend(self._backend.wait())
        event = self._events.popleft()
        index = event.worker.index
        if isinstance(event, Failed):
            error = event.failure.error(self.name_of(index))
            self._lost = self._lost or (
                f"{self.name_of(index)} has ended because of {event.failure.summary}"
            )
            raise error
        if isinstance(event, Death):
            self._living.discard(index)
            self._lost = self._lost or f"{self.name_of(index)}: its process {event.reason}"
            raise WorkerDied(self._lost)
        return event

    # --- steps

    def step(self, eager: bool) -> None:
        """Takes a step of all environments; see :meth:`stepper`."""
        if self.step_pending:
            self.finish_step()
        begin, wait = self._whole
        begin(eager)
        wait()

    @cached_property
    def _whole(self) -> tuple[Callable[[bool], None], Callable[[], None]]:
        return self.stepper(0, self.count)

    def stepper(self, first: int, stop: int) -> tuple[Callable[[bool], None], Callable[[], None]]:
        """Returns two functions, which begin and end steps of the processes of a group.

        A step uses the actions in the shared memory, and leaves its results there. The first
        function's argument is True to also reset rows in the step that ends their episode. The
        second function waits until all processes of the group have taken the step. It raises a
        ``WorkerError`` (also an instance of the original exception's type) if an environment
        failed, and a ``WorkerDied`` if a process has died.

        Args:
            first: number of the group's first process.
            stop: number after that of the group's last process.
        """
        buffers = self.buffers
        assert buffers is not None
        numbers, answers, eagerness = buffers.numbers, buffers.answers[first:stop], buffers.eager
        workers, wakeups = range(first, stop), self._wakeups[first:stop]
        poll = self._poll.poll
        expected = b""

        def begin(eager: bool) -> None:
            nonlocal expected
            if self._lost is not None or self.closed:
                self._check_running()
            self._pending.add(first)
            self._step = number = self._step + 1
            expected = number.to_bytes(8, _BYTE_ORDER) * len(workers)
            eagerness[0] = eager
            for worker in workers:
                numbers[worker] = number
            try:
                for wakeup in wakeups:
                    os.write(wakeup, STEP)
            except BrokenPipeError:
                # A process is dead: the step fails, and the other processes need not begin it.
                pass

        def wait() -> None:
            while answers.tobytes() != expected:
                for descriptor, _ in poll():
                    if descriptor != self._answers:
                        self._handle_events()
            self._pending.discard(first)

        return begin, wait

    def begin_step(self, workers: Iterable[int]) -> None:
        """Begins a step of some processes, which reset rows in the step that ends their episode.

        The step uses the actions in the shared memory. Other processes may be stepping.
        """
        buffers = self.buffers
        assert buffers is not None
        if self._lost is not None or self.closed:
            self._check_running()
        buffers.eager[0] = True
        self._step += 1
        for worker in workers:
            self._pending.add(worker)
            buffers.numbers[worker] = self._step
            self._wake(worker, STEP)

    def wait_for_answers(self, timeout: float | None = None) -> None:
        """Waits until a process may have finished its step, or for ``timeout`` seconds.

        Raises:
            WorkerError: if an environment failed; it is also an instance of the original
                exception's type.
            WorkerDied: if a process has died.
        """
        for descriptor, _ in self._poll.poll(timeout):
            if descriptor != self._answers:
                self._handle_events()

    def _handle_events(self, ignored: bool = False) -> None:
        """Handles events of the processes; failed steps raise an error, unless they are ignored."""
        if not self._events:
            self._events.extend(self._backend.wait(0))
        while self._events:
            event = self._next_event()
            if not ignored:
                self._raise_failed_step(event)

    def _raise_failed_step(self, event: Event) -> None:
        """Raises the error of a step that is still waited for."""
        buffers = self.buffers
        assert buffers is not None
        if isinstance(event, Message) and isinstance(event.content, CallFailed):
            number = buffers.numbers[event.worker.index]
            if event.content.number == -number:
                raise self._error(event.content, event.worker.index)

    def _error(self, failed: CallFailed, worker: int) -> WorkerError:
        name = self.name_of(worker) if failed.env is None else f"environment {failed.env}"
        return failed.failure.error(name)

    def finish_step(self) -> None:
        """Waits until all processes have finished the pending step, even if some of them fail.

        Raises:
            WorkerDied: if a process has died.
        """
        self._check_running()
        self._handle_events(ignored=True)
        # Some processes may not have been woken for the step, but all must take it.
        for index in self._late():
            self._wake(index, STEP)
        while self._late():
            for descriptor, _ in self._poll.poll():
                if descriptor != self._answers:
                    self._handle_events(ignored=True)
        self._pending.clear()

    def _late(self) -> list[int]:
        """Returns the processes that have not finished their steps."""
        buffers = self.buffers
        assert buffers is not None
        pairs = enumerate(zip(buffers.numbers, buffers.answers, strict=True))
        return [index for index, (number, answer) in pairs if abs(answer) != number]

    @property
    def step_pending(self) -> bool:
        """True if a step may still run in other processes, and nobody waits for its end."""
        return bool(self._pending)

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
        self.closed = True
        failures: list[Failed] = []
        if self._owner == os.getpid():
            failures = self._end()
        self._poll.close()
        for descriptor in (*self._wakeups, self._answers):
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
        first = worker * self._each
        last = min(first + self._each, self._envs) - 1
        return f"environment {first}" if first == last else f"environments {first} to {last}"
