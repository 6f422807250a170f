"""The processes of a :class:`~trawl.envs.ParallelEnv`, seen from the process that owns them."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trawl.backends.base import Death, Event, Failed, Message, Worker
from trawl.backends.process import ProcessBackend
from trawl.envs.own_process import parent_registry
from trawl.envs.parallel_area import Area, AreaPlan
from trawl.envs.parallel_worker import (
    AREA,
    MESSAGE,
    STEP,
    Bells,
    Broken,
    Facts,
    Maker,
    Order,
    Reply,
)
from trawl.errors import WorkerDied

# Seconds that processes have to close their environments before they are killed.
_CLOSING = 5.0
_ORDER: Literal["little", "big"] = sys.byteorder


class Crew:
    """Processes that run one environment each and step together.

    Each step has a number. A process that has taken the step writes the number to shared memory,
    and only this number counts as its answer. Bells merely wake the waiting side, and may ring
    more often than needed.

    Args:
        sources: source of each environment, and its keyword arguments.
        start_method: start method of the processes.

    Attributes:
        facts: description of each environment, sent by its process.
        area: the shared memory; None until :meth:`attach`.
        unsettled: True if a step was interrupted here and may still run in the processes;
            :meth:`settle` waits for its end.
    """

    def __init__(self, sources: Sequence[tuple[Any, Mapping[str, Any]]], start_method: str) -> None:
        self._backend = ProcessBackend(start_method)
        self._workers: list[Worker] = []
        self._living: set[int] = set()
        self._bells: list[int] = []
        self._answers = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events: deque[Event] = deque()
        self._replies: dict[int, Any] = {}
        self._number = 0
        self._step = 0
        self._lost: str | None = None
        self._owner = os.getpid()
        self.closed = False
        self.area: Area | None = None
        self.unsettled = False
        # Edge-triggered: each write to the bell is an edge, so that it never has to be read.
        self._poll = select.epoll()
        self._poll.register(self._answers, select.EPOLLIN | select.EPOLLET)
        self._poll.register(self._backend.fileno(), select.EPOLLIN)
        try:
            self.facts = self._start(sources)
        except BaseException:
            self.close()
            raise

    def _start(self, sources: Sequence[tuple[Any, Mapping[str, Any]]]) -> list[Facts]:
        registry = parent_registry()
        for index, (source, kwargs) in enumerate(sources):
            theirs, ours = os.pipe()
            self._bells.append(ours)
            try:
                bells = Bells(theirs, self._answers)
                maker = Maker(index, source, kwargs, bells, registry)
                self._workers.append(self._backend.launch(index, maker))
            finally:
                # Only the process keeps the reading end: the owner's writes fail when it is gone.
                os.close(theirs)
            self._living.add(index)
        found: dict[int, Facts] = {}
        while len(found) < len(sources):
            event = self._next_event()
            if isinstance(event, Message) and isinstance(event.content, Facts):
                found[event.worker.index] = event.content
        return [found[index] for index in sorted(found)]

    def attach(self, plan: AreaPlan) -> Area:
        """Allocates the shared memory, through which steps go from now on."""
        memory = self._backend.allocate(plan.nbytes)
        for worker in self._workers:
            worker.share(AREA, memory)
        self.call_all("attach", plan)
        self.area = area = Area(plan, memory.buffer)
        return area

    # --- orders

    def call_all(self, name: str, *args: Any) -> list[Any]:
        """Calls a method in all processes; returns the results in the order of the processes."""
        results = self.call(dict.fromkeys(range(len(self._workers)), (name, *args)))
        return [results[index] for index in sorted(results)]

    def call(self, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls methods in processes.

        Args:
            calls: name of the method and its arguments, by index of the process.

        Returns:
            The results, by index of the process.

        Raises:
            WorkerError: if a call raised an exception; the error is also of that type.
            WorkerDied: if a process is gone.
        """
        self.check()
        if self.unsettled:
            self.settle()
        self._replies.clear()
        numbers = {}
        for index, (name, *args) in calls.items():
            self._number += 1
            numbers[index] = self._number
            self._workers[index].send(Order(self._number, name, args))
            if self.area is not None:
                self._ring(index, MESSAGE)
        while not self._replies.keys() >= set(numbers.values()):
            self._take(self._next_event(), set(numbers.values()))
        return {index: self._replies[number] for index, number in numbers.items()}

    def _take(self, event: Event, awaited: set[int]) -> None:
        """Handles a message; ignores answers to orders that nobody waits for any more."""
        if not isinstance(event, Message) or event.content.number not in awaited:
            return
        if isinstance(event.content, Broken):
            raise event.content.failure.error(_name(event.worker.index))
        if isinstance(event.content, Reply):
            self._replies[event.content.number] = event.content.value

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
            error = event.failure.error(_name(index))
            self._lost = self._lost or f"{_name(index)} has ended with {event.failure.summary}"
            raise error
        if isinstance(event, Death):
            self._living.discard(index)
            self._lost = self._lost or f"{_name(index)}: its process {event.reason}"
            raise WorkerDied(self._lost)
        return event

    # --- steps

    def step(self, eager: bool) -> None:
        """Takes a step with the actions in the shared memory.

        Args:
            eager: True if rows are also reset in the step that ends their episode.

        Raises:
            WorkerError: if an environment raised an exception; the error is also of that type.
            WorkerDied: if a process is gone.
        """
        if self._lost is not None or self.closed:
            self.check()
        if self.unsettled:
            self.settle()
        area = self.area
        assert area is not None
        self.unsettled = True
        self._step = number = self._step + 1
        area.eager[0] = eager
        area.number[0] = number
        write = os.write
        try:
            for bell in self._bells:
                write(bell, STEP)
        except BrokenPipeError:
            # A process is dead: the step fails, and the other processes need not begin it.
            pass
        answers, poll = area.answers, self._poll.poll
        expected = number.to_bytes(8, _ORDER) * len(self._bells)
        while answers.tobytes() != expected:
            for descriptor, _ in poll():
                if descriptor != self._answers:
                    self._look(number)
        self.unsettled = False

    def _look(self, number: int) -> None:
        """Handles events of the processes during a step."""
        if not self._events:
            self._events.extend(self._backend.wait(0))
        while self._events:
            self._take(self._next_event(), {-number})

    def settle(self) -> None:
        """Waits until all processes have ended a step that was interrupted here, even by an error.

        Raises:
            WorkerDied: if a process is gone.
        """
        self.check()
        self._look(0)
        area = self.area
        assert area is not None
        # Some processes may not have been told of the step: all must take equally many.
        for index, answer in enumerate(area.answers):
            if abs(answer) != self._step:
                self._ring(index, STEP)
        while any(abs(answer) != self._step for answer in area.answers):
            for descriptor, _ in self._poll.poll():
                if descriptor != self._answers:
                    self._look(0)
        self.unsettled = False

    def _ring(self, index: int, what: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._bells[index], what)

    # --- the end

    def check(self) -> None:
        """Refuses to go on without all processes.

        Raises:
            RuntimeError: if the environments are closed.
            WorkerDied: if one is gone.
        """
        if self.closed:
            raise RuntimeError("the environments are closed already")
        if self._lost is not None:
            raise WorkerDied(self._lost)

    def close(self) -> list[Failed]:
        """Ends all processes: they close their environments, or are killed if that takes long.

        Returns:
            The failures in the processes.
        """
        if self.closed:
            return []
        self.closed = True
        failures: list[Failed] = []
        if self._owner == os.getpid():
            failures = self._end()
        self._poll.close()
        for descriptor in (*self._bells, self._answers):
            os.close(descriptor)
        return failures

    def _end(self) -> list[Failed]:
        failures = []
        deadline = time.monotonic() + _CLOSING
        self._living -= {event.worker.index for event in self._events if isinstance(event, Death)}
        try:
            for index in self._living:
                self._workers[index].stop()
                # stop() also sends a message, for a process that catches the signal. The bell
                # makes the process read it.
                self._ring(index, MESSAGE)
            while self._living and (left := deadline - time.monotonic()) > 0:
                for event in self._backend.wait(left):
                    if isinstance(event, Death):
                        self._living.discard(event.worker.index)
                    elif isinstance(event, Failed):
                        failures.append(event)
        finally:
            self._backend.close()
        return failures


def _name(index: int) -> str:
    return f"environment {index}"
