"""The processes of a :class:`~trawl.envs.ParallelEnv`, as seen by their owner."""

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

# Seconds in which processes are to close their environments, before they are killed.
_CLOSING = 5.0
_ORDER: Literal["little", "big"] = sys.byteorder


class Crew:
    """Processes with an environment each: told to step together, and watched.

    Each step has a number. The processes write it to shared memory when they have taken it, and
    only this says that they have; bells wake who waits, and may ring once too often.

    Args:
        sources: what each environment is made from, and keyword arguments for it.
        start_method: where processes come from.

    Attributes:
        facts: what each process said of its environment.
        area: the shared memory, once there is one.
        unsettled: whether a step was broken off here and may go on there; :meth:`settle` waits
            for its end.
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
        # Edges, so that nothing has to be read: each write to the bell is one.
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
                # The end of its owner is the end of what a process can read.
                os.close(theirs)
            self._living.add(index)
        found: dict[int, Facts] = {}
        while len(found) < len(sources):
            event = self._next_event()
            if isinstance(event, Message) and isinstance(event.content, Facts):
                found[event.worker.index] = event.content
        return [found[index] for index in sorted(found)]

    def attach(self, plan: AreaPlan) -> Area:
        """Lets steps go through shared memory."""
        memory = self._backend.allocate(plan.nbytes)
        for worker in self._workers:
            worker.share(AREA, memory)
        self.call_all("attach", plan)
        self.area = area = Area(plan, memory.buffer)
        return area

    # --- orders

    def call_all(self, name: str, *args: Any) -> list[Any]:
        """Calls a method of all processes; the results."""
        results = self.call(dict.fromkeys(range(len(self._workers)), (name, *args)))
        return [results[index] for index in sorted(results)]

    def call(self, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls methods of processes: for each of them a name and arguments; the results.

        Raises:
            WorkerError: if a call raised an exception; it is of that type too.
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
        """Takes in a message; those of orders that nobody waits for any more are left out."""
        if not isinstance(event, Message) or event.content.number not in awaited:
            return
        if isinstance(event.content, Broken):
            raise event.content.failure.error(_name(event.worker.index))
        if isinstance(event.content, Reply):
            self._replies[event.content.number] = event.content.value

    def _next_event(self) -> Event:
        """What happens next.

        Raises:
            WorkerError: if that is the end of a process.
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
        """Takes a step with the actions in the area.

        Args:
            eager: whether rows are reset after the step that ends their episode.

        Raises:
            WorkerError: if an environment raised an exception; it is of that type too.
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
            # Somebody is dead; the others needn't hear of it.
            pass
        answers, poll = area.answers, self._poll.poll
        expected = number.to_bytes(8, _ORDER) * len(self._bells)
        while answers.tobytes() != expected:
            for descriptor, _ in poll():
                if descriptor != self._answers:
                    self._look(number)
        self.unsettled = False

    def _look(self, number: int) -> None:
        """Takes in what happened to the processes during a step."""
        if not self._events:
            self._events.extend(self._backend.wait(0))
        while self._events:
            self._take(self._next_event(), {-number})

    def settle(self) -> None:
        """Waits until a step that was broken off here has ended there, whatever came of it.

        Raises:
            WorkerDied: if a process is gone.
        """
        self.check()
        self._look(0)
        area = self.area
        assert area is not None
        # Whoever was not yet told to take it is told now: all are to have taken as many.
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
            RuntimeError: if they were closed.
            WorkerDied: if one is gone.
        """
        if self.closed:
            raise RuntimeError("the environments are closed already")
        if self._lost is not None:
            raise WorkerDied(self._lost)

    def close(self) -> list[Failed]:
        """Ends all processes: they close their environments, or are killed if that takes long.

        Returns:
            What went wrong over there.
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
                # It says so by a message, too, should the signal be caught by anyone.
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
