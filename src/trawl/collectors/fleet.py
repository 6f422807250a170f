"""Pool of workers: starts them, sends them requests, watches them, and replaces dead ones.

The pool knows neither what is collected nor where the workers run. It guarantees that each request
to collect brings one batch: when a worker dies, its pending requests are sent again to its
replacement. Pending calls are sent again as well, even if such a call made the worker die.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count as count_from
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import cloudpickle

from trawl.backends.base import Backend, Death, Event, Failed, Message, Worker
from trawl.collectors.base import CollectorClosed
from trawl.collectors.config import warn
from trawl.collectors.orders import (
    Answer,
    Arrange,
    Broken,
    Call,
    Changed,
    Collect,
    Done,
    Drop,
    NotClosed,
    Ready,
    Reply,
    Warned,
    Writing,
    Written,
)
from trawl.collectors.worker import Program
from trawl.errors import WorkerDied, WorkerError

# Seconds that workers have to close their environments before they are killed.
_CLOSING = 5.0
_living: WeakSet[Fleet] = WeakSet()


@atexit.register
def _close_all() -> None:
    for fleet in list(_living):
        with contextlib.suppress(WorkerError):  # at exit nothing can handle it: go on with the next
            fleet.close()


@dataclass(frozen=True)
class Limits:
    """Limits on restarts and on the time that a worker may be silent.

    Attributes:
        each: maximum number of restarts of any one worker.
        total: maximum number of restarts of all workers together.
        timeout: seconds without an answer after which a worker counts as dead; None for no limit.
    """

    each: int
    total: int
    timeout: float | None


@dataclass
class Member:
    """A slot of the pool, filled by one worker at a time.

    Attributes:
        orders: pending requests by number, each with the memory for its batch.
        known: names of memory and of its divisions that the worker knows.
        ready: first message of the worker; None before it arrives.
        trajectory: id of the next trajectory to begin, as far as is known.
        writing: True while the worker writes into a replay buffer that others write into too.
        written: answer for a batch that is in that replay buffer, until the request is done.
        frames: number of frames delivered, including those of workers that were replaced.
        batches: number of batches delivered, including those of workers that were replaced.
        facts: latest statistics of the worker.
        silent: seconds of silence for which the worker was killed, or None.
    """

    index: int
    worker: Worker | None = None
    orders: dict[int, tuple[Collect | Call, tuple[Any, Any]]] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    ready: Ready | None = None
    trajectory: int = 0
    writing: bool = False
    written: Done | None = None
    restarts: int = 0
    heard: float = 0.0
    frames: int = 0
    batches: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    silent: float | None = None
    _env_restarts: int = 0

    def stats(self) -> dict[str, Any]:
        """Returns the statistics known here: the worker may be busy, and is not asked."""
        facts = {
            "frames": self.frames,
            "batches": self.batches,
            "alive": self.worker is not None,
            "restarts": self.restarts,
            **self.facts,
        }
        if "env_restarts" in facts:
            facts["env_restarts"] += self._env_restarts
        return facts

    def forget_worker(self) -> None:
        """Marks the worker as dead, and keeps its count of environment restarts."""
        self.worker = None
        # The replacement counts from zero.
        if "env_restarts" in self.facts:
            self._env_restarts += self.facts["env_restarts"]
            self.facts["env_restarts"] = 0


class Fleet:
    """Pool of workers and their pending requests.

    Args:
        backend: place where the workers run; the pool closes it.
        count: number of workers.
        program: returns the current program for a slot's worker; called again for a replacement.
        limits: limits on restarts and silence.
        note: called with a worker's number and the change, after a call through the worker's
            handle changed the worker.

    Attributes:
        members: the slots, by index.
    """

    def __init__(
        self,
        backend: Backend,
        count: int,
        program: Callable[[Member], Program],
        limits: Limits,
        note: Callable[[int, Changed], None],
    ) -> None:
        self.backend = backend
        self._note = note
        self.members = [Member(index) for index in range(count)]
        self._program = program
        self._limits = limits
        self._number = 0
        self._fresh = count_from(1)
        self._names: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._gone: deque[int] = deque()
        self._events: deque[Event] = deque()
        self._told: deque[tuple[int, Any]] = deque()
        self._error: WorkerError | None = None
        self._done: deque[tuple[int, Done]] = deque()
        self._replies: dict[int, Reply | Broken] = {}
        self._unheeded: set[int] = set()
        self._closed = self._closing = False
        self._waiter: int | None = None
        self._left = threading.Event()
        self._owner = os.getpid()
        _living.add(self)

    # --- life

    def start(self) -> None:
        """Starts all workers, and waits until their collectors are made."""
        for member in self.members:
            self._launch(member)
        self._pump_until(lambda: all(member.ready is not None for member in self.members))

    def grow(self, count: int) -> None:
        """Starts further workers, and waits until their collectors are made."""
        first = len(self.members)
        added = [Member(first + number) for number in range(count)]
        self.members += added
        for member in added:
            self._launch(member)
        self._pump_until(lambda: all(member.ready is not None for member in added))

    def _launch(self, member: Member) -> None:
        member.ready = None
        member.known.clear()
        member.heard = time.monotonic()
        member.worker = self.backend.launch(member.index, self._program(member))
        for order, place in member.orders.values():
            self._send(member, order, place)

    def close(self, timeout: float | None = None) -> None:
        """Ends all workers: they close their environments, or are killed if that takes too long.

        Args:
            timeout: seconds before workers are killed; None for a default of a few seconds.

        Raises:
            WorkerError: if an environment could not be closed; the error is also of the type of
                the original.
        """
        if self._closing or self._owner != os.getpid():
            return
        self._closing = True
        deadline = time.monotonic() + (_CLOSING if timeout is None else timeout)
        failed: list[Message] = []
        try:
            for member in self.members:
                if member.worker is not None:
                    member.worker.stop()
            self._wait_for_waiter(deadline)
            while any(member.worker is not None for member in self.members):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                # Events that an error left unhandled may include deaths.
                events, self._events = self._events or self.backend.wait(left), deque()
                for event in events:
                    self._take_last(event)
                    if isinstance(event, Message) and isinstance(event.content, NotClosed):
                        failed.append(event)
        finally:
            self._closed = True
            self.backend.close()
            for member in self.members:
                if member.written is not None:
                    self._finish(member, member.written)
                member.worker = None
                member.orders.clear()
        if failed:
            raise failed[0].content.failure.error(f"worker {failed[0].worker.index}")

    def _take_last(self, event: Event) -> None:
        """Handles an event of a worker that was told to stop."""
        member = self.members[event.worker.index]
        if isinstance(event, Death):
            member.worker = None
        elif isinstance(event, Message) and isinstance(event.content, (Written, Done)):
            self._read(member, event.content)

    def _wait_for_waiter(self, deadline: float) -> None:
        """Waits until no other thread waits for workers; kills the workers at the deadline."""
        if self._waiter in (None, threading.get_ident()):
            return
        if not self._left.wait(max(0.0, deadline - time.monotonic())):
            for member in self.members:
                if member.worker is not None:
                    member.worker.kill()
            self._left.wait()

    @property
    def alive(self) -> int:
        """Number of workers that are alive, as far as is known."""
        return sum(member.worker is not None for member in self.members)

    @property
    def restarts(self) -> int:
        """Number of replacements of workers so far."""
        return sum(member.restarts for member in self.members)

    def _check_owner(self) -> None:
        """Raises an error in a forked process, which does not own the workers."""
        if self._owner != os.getpid():
            raise RuntimeError(
                "this collector belongs to another process, which this one was forked from: make "
                "one here"
            )

    # --- orders

    @property
    def last_order(self) -> int:
        """Number of the last request."""
        return self._number

    def new_number(self) -> int:
        """Returns a number for a new request."""
        self._number += 1
        return self._number

    def order(self, index: int, order: Collect, memory: Any = None, joint: Any = None) -> None:
        """Sends a worker a request to collect.

        Args:
            index: number of the worker.
            order: the request, with its number; its names of memory and division are set here.
            memory: memory for the batch, or None.
            joint: division of the memory among workers.
        """
        self._check_owner()
        self.send_told()
        self._forget()
        if memory is not None:
            order = replace(order, memory=self._name(memory), joint=self._name(joint))
        self._give(self.members[index], order, (memory, joint))

    def interrupt(self, index: int) -> None:
        """Interrupts the pending requests of a worker that are breakable."""
        member = self.members[index]
        if member.worker is not None:
            member.worker.interrupt(self._number)

    def _name(self, thing: Any) -> int:
        """Returns the name under which workers know a piece of memory, or its division."""
        if thing not in self._names:
            self._names[thing] = name = next(self._fresh)
            gone = weakref.finalize(thing, self._gone.append, name)
            gone.atexit = False
        return self._names[thing]

    def _forget(self) -> None:
        """Lets workers free memory that the driver has freed."""
        while self._gone:
            name = self._gone.popleft()
            for member in self.members:
                if name in member.known and member.worker is not None:
                    member.worker.send(Drop(name))
                    member.worker.forget(name)
                member.known.discard(name)

    def tell(self, index: int, content: Any) -> None:
        """Queues a message that brings no answer; it is not sent again to a replacement.

        Any thread may call this. The message is sent before the next request, or by
        :meth:`send_told`.
        """
        self._told.append((index, content))

    def send_told(self) -> None:
        """Sends the messages that :meth:`tell` queued."""
        while self._told:
            index, content = self._told.popleft()
            worker = self.members[index].worker
            if worker is not None:
                worker.send(content)

    def call(self, calls: dict[int, tuple[Any, ...]], kwargs: Any = None) -> dict[int, Any]:
        """Calls functions with the collectors of workers, and waits for the results.

        Args:
            calls: for each worker to call, the function and its further arguments.
            kwargs: keyword arguments, by worker.

        Raises:
            WorkerError: if a call raised an exception; the error is also of its type.
        """
        numbers = self._call_all(calls, kwargs or {})
        waiting = set(numbers.values())
        try:
            self._pump_until(lambda: waiting <= self._replies.keys())
        except BaseException:
            self._unheeded |= waiting
            raise
        replies = [self._replies.pop(number) for number in numbers.values()]
        for index, reply in zip(numbers, replies, strict=True):
            if isinstance(reply, Broken):
                raise reply.failure.error(f"worker {index}")
        return {
            index: pickle.loads(reply.value)
            for index, reply in zip(numbers, replies, strict=True)
            if isinstance(reply, Reply)
        }

    def cast(self, calls: dict[int, tuple[Any, ...]]) -> None:
        """Calls functions as :meth:`call` does, without waiting; errors are raised later."""
        self._unheeded.update(self._call_all(calls, {}).values())

    def _call_all(self, calls: dict[int, tuple[Any, ...]], kwargs: Any) -> dict[int, int]:
        # Everything is pickled before anything is sent, so that a failure changes nothing.
        packed = {
            index: cloudpickle.dumps((function, args, kwargs.get(index, {})))
            for index, (function, *args) in calls.items()
        }
        self.send_told()
        self._check_owner()
        numbers = {}
        for index, data in packed.items():
            numbers[index] = number = self.new_number()
            self._give(self.members[index], Call(number, data))
        return numbers

    def _give(
        self, member: Member, order: Collect | Call, place: tuple[Any, Any] = (None, None)
    ) -> None:
        if not member.orders:
            # Silence counts from now: the worker had nothing to answer before.
            member.heard = time.monotonic()
        member.orders[order.number] = order, place
        self._send(member, order, place)

    def _send(self, member: Member, order: Collect | Call, place: tuple[Any, Any]) -> None:
        if member.worker is None:
            return
        if isinstance(order, Collect) and order.memory is not None:
            self._introduce(member, member.worker, order, place)
        member.worker.send(order)

    def _introduce(
        self, member: Member, worker: Worker, order: Collect, place: tuple[Any, Any]
    ) -> None:
        """Sends the worker the memory and the division that a request names, if it lacks them."""
        memory, joint = place
        if order.memory is not None and order.memory not in member.known:
            worker.share(order.memory, memory)
            member.known.add(order.memory)
        if order.joint not in member.known:
            worker.send(Arrange(order.joint, joint))
            member.known.add(order.joint)

    # --- answers

    def next_done(self, timeout: float | None = None) -> tuple[int, Done] | None:
        """Returns a worker's number and its answer for the next batch that was collected.

        Args:
            timeout: seconds after which None is returned; None to wait as long as it takes.

        Raises:
            WorkerError: if a worker failed; the error is also of the type of the original.
            WorkerDied: if a worker died and may not be replaced.
        """
        if timeout is None:
            self._pump_until(lambda: bool(self._done))
        elif not self._done:
            self._pump(timeout)
        return self.take_done()

    def take_done(self) -> tuple[int, Done] | None:
        """Returns the next batch like :meth:`next_done`, but does not wait: None if there is none.

        It may also be called after :meth:`close`.
        """
        if not self._done:
            return None
        index, done = self._done.popleft()
        self.members[index].frames += done.frames
        self.members[index].batches += 1
        return index, done

    def settle(self, timeout: float | None = None) -> None:
        """Waits until no request is pending.

        Args:
            timeout: seconds to wait; None to wait as long as it takes.

        Raises:
            TimeoutError: if it takes longer.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while any(member.orders for member in self.members):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(
                    "the workers did not finish their current batches within the time limit"
                )
            self._pump(left)

    def _pump_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._pump(None)

    def _pump(self, timeout: float | None) -> None:
        """Handles the next events. After an error in a worker, each later call raises it again."""
        if self._error is not None:
            raise self._error
        self._check_owner()
        try:
            self.send_told()
            self._wait(timeout)
            while self._events:
                self._take(self._events.popleft())
        except WorkerError as error:
            self._error = error
            raise

    def _wait(self, timeout: float | None) -> None:
        if self._events:
            return
        limit = self._patience()
        if timeout is not None:
            limit = timeout if limit is None else min(limit, timeout)
        self._events.extend(self._listen(limit))
        now = time.monotonic()
        for event in self._events:
            self.members[event.worker.index].heard = now
        # Only now: a worker whose message has just been read is not silent.
        self._kill_silent(now)

    def _listen(self, limit: float | None) -> list[Event]:
        """Returns the next events of workers, after ``limit`` seconds at most.

        Raises:
            CollectorClosed: if another thread or a signal handler closed the pool meanwhile.
        """
        if self._closing:
            raise CollectorClosed
        self._waiter = threading.get_ident()
        try:
            # If the time passed because this process was held up, messages may be there by now.
            events = self.backend.wait(limit) or self.backend.wait(0)
        except (OSError, RuntimeError, ValueError):
            if self._closing:
                raise CollectorClosed from None
            raise
        finally:
            self._waiter = None
        if self._closing:
            self._events.extend(events)
            self._left.set()
            raise CollectorClosed
        return events

    def _patience(self) -> float | None:
        """Returns the seconds until a silent worker counts as dead, or None."""
        if self._limits.timeout is None:
            return None
        since = [m.heard for m in self.members if m.orders or m.ready is None]
        return max(0.0, min(since) + self._limits.timeout - time.monotonic()) if since else None

    def _kill_silent(self, now: float) -> None:
        timeout = self._limits.timeout
        for member in self.members:
            waits = member.orders or member.ready is None
            if timeout is not None and waits and now - member.heard >= timeout and member.worker:
                member.worker.kill()
                member.silent = timeout

    def _take(self, event: Event) -> None:
        member = self.members[event.worker.index]
        if event.worker is not member.worker:
            return
        match event:
            case Death(reason=reason):
                self._replace(member, reason)
            case Failed(failure=failure):
                raise failure.error(f"worker {member.index}")
            case Message(content=content):
                self._read(member, content)

    def _read(self, member: Member, content: Answer) -> None:
        if isinstance(content, Warned):
            warn(f"in worker {member.index}: {content.text}", content.category)
            return
        if isinstance(content, Changed):
            self._note(member.index, content)
            return
        if isinstance(content, NotClosed):
            # Another event ended the worker, and tells the reason.
            return
        if isinstance(content, Writing):
            member.writing = True
            return
        if isinstance(content, Written):
            member.writing, member.written = False, content.done
            return
        if isinstance(content, Ready):
            member.ready = content
            member.trajectory = max(member.trajectory, content.trajectory)
            return
        if isinstance(content, Done):
            self._finish(member, content)
            return
        order, _ = member.orders.pop(content.number, (None, None))
        unheeded = content.number in self._unheeded
        self._unheeded.discard(content.number)
        if isinstance(content, Broken) and (unheeded or isinstance(order, Collect)):
            raise content.failure.error(f"worker {member.index}")
        elif not unheeded:
            self._replies[content.number] = content

    def _finish(self, member: Member, done: Done) -> None:
        """Records a batch as collected."""
        member.orders.pop(done.number, None)
        member.written = None
        member.trajectory = max(member.trajectory, done.trajectory)
        member.facts = dict(done.facts)
        self._done.append((member.index, done))

    # --- deaths

    def _replace(self, member: Member, reason: str) -> None:
        if member.written is not None:
            self._finish(member, member.written)
        member.forget_worker()
        if member.silent is not None:
            reason = f"gave no answer for {member.silent:g} s (worker_timeout), and was ended"
            member.silent = None
        what = f"worker {member.index} {reason}"
        if member.writing:
            raise WorkerDied(
                f"{what} while it wrote into the replay buffer, which may be locked for good: it "
                "is not to be used any more. Into a buffer that was not made shared by share() "
                "this process writes, and the death of a worker does no harm to it"
            )
        limits = self._limits
        if member.restarts >= limits.each or self.restarts >= limits.total:
            raise WorkerDied(
                f"{what}, and is not replaced again: replacements of it: {member.restarts} "
                f"(max_restarts={limits.each}), of all workers: {self.restarts} "
                f"(max_total_restarts={limits.total})"
            )
        member.restarts += 1
        try:
            self._launch(member)
        except BaseException as error:
            self._error = WorkerDied(f"{what}, and could not be replaced: {error!r}")
            raise
        warn(
            f"{what}; another takes its place (restart {member.restarts} of {limits.each}), and "
            "what it was collecting is collected again",
            RuntimeWarning,
        )
