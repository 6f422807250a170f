"""Pool of workers: starts them, sends them requests, watches them, and replaces dead ones.

The pool knows neither what is collected nor where the workers run. It guarantees that each request
to collect brings one batch: when a worker dies, its pending requests are sent again to its
replacement. Pending calls are sent again as well, even if a call caused the worker's death.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import cloudpickle

from trawl.backends.base import Backend, Death, Event, Failed, MakeService, Message
from trawl.collectors.config import warn
from trawl.collectors.driver.background import CollectorClosed
from trawl.collectors.workers import requests
from trawl.collectors.workers.assembler import BufferSlice, WorkerBatch
from trawl.collectors.workers.slot import BufferNames, SlotLimits, WorkerSlot
from trawl.collectors.workers.snapshots import kept_copies
from trawl.envs.kinds import KINDS
from trawl.errors import WorkerDied, WorkerError
from trawl.interrupts import check_interrupt, may_interrupt
from trawl.weights.groups import PreparedUpdate

_CLOSING = 5.0  # seconds that workers have to close their environments before they are killed
_GLANCE = 0.2  # seconds after which a wait for batches looks whether Ctrl-C was pressed
_living: WeakSet[WorkerPool] = WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_living):
        with contextlib.suppress(WorkerError):  # at exit, nothing can handle the error
            pool.close()


class WorkerPool:
    """Pool of workers and their pending requests.

    Args:
        backend: place where the workers run; the pool closes it.
        specify: function that returns the current specification of a slot's worker; called again
            for a replacement.
        limits: limits on restarts and silence.
        note: function that is called with a worker's number and the change, after a call through
            the worker's handle changed the worker's state.

    Attributes:
        slots: the slots of the workers, by number.
        batches: batches that workers have collected, and that :meth:`pop_batch` will return.
    """

    def __init__(
        self,
        backend: Backend,
        specify: Callable[[WorkerSlot], MakeService],
        limits: SlotLimits,
        note: Callable[[int, requests.StateChanged], None],
    ) -> None:
        self.backend = backend
        self._note = note
        self.slots: list[WorkerSlot] = []
        self._specify = specify
        self._limits = limits
        self._number = 0
        self._names = BufferNames()
        self._events: deque[Event] = deque()
        self._messages: deque[tuple[int, Any]] = deque()
        self._error: WorkerError | None = None
        self.batches: deque[WorkerBatch] = deque()
        self._results: dict[int, requests.WorkerAnswer] = {}
        self._abandoned: set[int] = set()
        self._closing = False
        self._waiter: int | None = None
        self._left = threading.Event()
        # Time at which it was last looked for events.
        self._looked = 0.0
        self._owner = os.getpid()
        _living.add(self)

    # --- life

    def add_workers(self, count: int) -> None:
        """Starts workers, and waits until their collectors are made."""
        first = len(self.slots)
        added = [WorkerSlot(first + number) for number in range(count)]
        self.slots += added
        for slot in added:
            self._launch(slot)
        ready: list[requests.WorkerReady] = []
        with KINDS.warning_for(ready):
            self._pump_until(lambda: all(slot.ready is not None for slot in added))
            ready += [slot.ready for slot in added if slot.ready is not None]

    def _launch(self, slot: WorkerSlot) -> None:
        slot.ready = None
        slot.known.clear()
        slot.heard = time.monotonic()
        slot.fill(self.backend.launch(slot.index, self._specify(slot)))

    def close(self, timeout: float | None = None) -> None:
        """Ends all workers, after they have closed their environments.

        Args:
            timeout: seconds after which running workers are killed; None for a few seconds.

        Raises:
            WorkerError: if an environment failed to close (also an instance of the original type).
        """
        if self._closing or self._owner != os.getpid():
            return
        self._closing = True
        deadline = time.monotonic() + (_CLOSING if timeout is None else timeout)
        failed: list[WorkerError] = []
        try:
            for slot in self.slots:
                if slot.worker is not None:
                    slot.worker.stop()
            self._wait_for_waiter(deadline)
            last = False
            while not last and any(slot.worker is not None for slot in self.slots):
                left = max(0.0, deadline - time.monotonic())
                # If this process was suspended, events have come that were not waited for.
                last = not left and not self._events
                # After an error, events may be left unhandled, and some of them may be deaths.
                events, self._events = self._events or self.backend.wait(left), deque()
                for event in events:
                    self._handle_last(event, failed)
        finally:
            self.backend.close()
            for slot in self.slots:
                if slot.written is not None:
                    self.batches.append(slot.finish(slot.written))
                slot.worker = None
                slot.pending.clear()
        if failed:
            raise failed[0]

    def _handle_last(self, event: Event, failed: list[WorkerError]) -> None:
        """Handles an event of a worker that was told to stop."""
        slot = self.slots[event.worker.index]
        match event:
            case Death():
                slot.worker = None
            case Message(content=requests.CloseFailed(failure=failure)):
                failed.append(failure.error(f"worker {slot.index}"))
            case Message(content=(requests.WriteEnded() | requests.BatchReady()) as content):
                self._read(slot, content)

    def _wait_for_waiter(self, deadline: float) -> None:
        """Waits until no other thread waits for workers; kills the workers at the deadline."""
        if self._waiter in (None, threading.get_ident()):
            return
        if not self._left.wait(max(0.0, deadline - time.monotonic())):
            for slot in self.slots:
                if slot.worker is not None:
                    slot.worker.kill()
            self._left.wait()

    @property
    def restarts(self) -> int:
        """Number of times that workers have been replaced so far."""
        return sum(slot.restarts for slot in self.slots)

    def _check_owner(self) -> None:
        """Raises an error in a forked process, which does not own the workers."""
        if self._owner != os.getpid():
            raise RuntimeError(
                "this collector belongs to the process that this process was forked from: make "
                "another collector here"
            )

    # --- requests

    @property
    def last_request(self) -> int:
        """Number of the last request."""
        return self._number

    def next_number(self) -> int:
        """Returns a number for a new request."""
        self._number += 1
        return self._number

    def request_batch(
        self, index: int, place: BufferSlice, request: requests.CollectRequest
    ) -> int:
        """Requests a batch from a worker.

        Args:
            index: number of the worker.
            place: buffer slice that the batch is written into.
            request: the request, still without its number and place.

        Returns:
            The number of the request.
        """
        self._check_owner()
        self.send_messages()
        for freed in self._names.freed():
            for slot in self.slots:
                slot.unmap(freed)
        number, memory, partition = self.next_number(), place.memory, place.partition
        name = self._names.name
        request = replace(
            request,
            number=number,
            memory=None if memory is None else name(memory),
            partition=0 if partition is None else name(partition),
            part=place.part,
        )
        self.slots[index].send(request, place)
        return number

    def interrupt(self, index: int) -> None:
        """Interrupts each breakable request that is pending for a worker."""
        worker = self.slots[index].worker
        if worker is not None:
            worker.interrupt(self._number)

    def queue_message(self, index: int, content: Any) -> None:
        """Queues a message that needs no answer and is not sent again to a replacement.

        Any thread may call this. The message is sent before the next request, or by
        :meth:`send_messages`.
        """
        self._messages.append((index, content))

    def send_messages(self) -> None:
        """Sends the messages that :meth:`queue_message` queued."""
        while self._messages:
            index, content = self._messages.popleft()
            worker = self.slots[index].worker
            if worker is not None:
                worker.send(content)

    def call(self, calls: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls functions with the collectors of workers, and waits for the results.

        Args:
            calls: by worker number, a function and its arguments after the worker's collector.

        Raises:
            WorkerError: if a call raised an exception; where possible, the error also has the
                type of that exception.
        """
        # Everything is pickled before anything is sent, so that a failure changes nothing.
        packed = {index: cloudpickle.dumps(call) for index, call in calls.items()}
        self.send_messages()
        self._check_owner()
        numbers = {}
        for index, data in packed.items():
            numbers[index] = number = self.next_number()
            self.slots[index].send(requests.CallRequest(number, data))
        waiting = set(numbers.values())
        try:
            self._pump_until(lambda: waiting <= self._results.keys())
        except BaseException:
            self._abandoned |= waiting
            raise
        results = {index: self._results.pop(number) for index, number in numbers.items()}
        values = {index: one.result(f"worker {index}") for index, one in results.items()}
        return {index: pickle.loads(value) for index, value in values.items()}

    # --- answers

    def next_batch(self, timeout: float | None = None) -> WorkerBatch | None:
        """Returns the next batch that a worker has collected.

        Args:
            timeout: seconds after which None is returned; None for no limit.

        Raises:
            WorkerError: if a worker failed (also an instance of the original exception's type).
            WorkerDied: if a worker died and may not be replaced.
            KeyboardInterrupt: if Ctrl-C was pressed; requests stay pending.
        """
        if timeout is None:
            while not self.batches:
                check_interrupt()
                self._pump(_GLANCE if may_interrupt() and self.backend.isolated else None)
        elif not self.batches:
            self._pump(timeout)
        return self.pop_batch()

    def pop_batch(self) -> WorkerBatch | None:
        """Returns the next batch without waiting; None if there is none.

        The method can also be called after :meth:`close`.
        """
        if not self.batches:
            return None
        batch = self.batches.popleft()
        slot = self.slots[batch.index]
        slot.frames += batch.answer.frames
        slot.batches += 1
        return batch

    def keep_sent(self, updates: Sequence[PreparedUpdate], counts: Mapping[int, int]) -> None:
        """Keeps copies of weights, which replacements of workers may need."""
        if any(slot.snapshot is not None for slot in self.slots):
            for worker, sent in kept_copies(updates, counts):
                self.slots[worker].keep_sent(sent)

    def settle(self, timeout: float | None = None) -> None:
        """Waits until no request is pending.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            TimeoutError: if requests are still pending after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while any(slot.pending for slot in self.slots):
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
        """Waits at most ``timeout`` seconds for events of workers, and handles them.

        If a worker has failed, each later call raises its error again.
        """
        if self._error is not None:
            raise self._error
        self._check_owner()
        try:
            self.send_messages()
            self._wait(timeout)
            while self._events:
                self._handle(self._events.popleft())
        except WorkerError as error:
            self._error = error
            raise

    def _wait(self, timeout: float | None) -> None:
        if self._events:
            return
        limit = self._limits.patience(self.slots)
        if timeout is not None:
            limit = timeout if limit is None else min(limit, timeout)
        self._events.extend(self._listen(limit))
        now = time.monotonic()
        self._limits.excuse(self.slots, self._looked, now)
        self._looked = now
        for event in self._events:
            self.slots[event.worker.index].heard = now
        # The check comes last, because a worker whose message has just been read is not silent.
        self._limits.kill_silent(self.slots, now)

    def _listen(self, limit: float | None) -> list[Event]:
        """Waits at most ``limit`` seconds for events of workers, and returns them.

        Raises:
            CollectorClosed: if another thread or a signal handler closed the pool meanwhile.
        """
        if self._closing:
            raise CollectorClosed
        self._waiter = threading.get_ident()
        try:
            events = self.backend.wait(limit)
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

    def _handle(self, event: Event) -> None:
        slot = self.slots[event.worker.index]
        if event.worker is not slot.worker:
            return
        match event:
            case Death(reason=reason):
                self._replace(slot, reason)
            case Failed(failure=failure):
                raise failure.error(f"worker {slot.index}")
            case Message(content=content):
                self._read(slot, content)

    def _read(self, slot: WorkerSlot, content: requests.FromWorker) -> None:
        match content:
            case requests.BatchReady():
                self.batches.append(slot.finish(content))
            case requests.WorkerReady():
                slot.start(content)
            case requests.WorkerWarning():
                warn(f"in worker {slot.index}: {content.text}", content.category)
            case requests.StateChanged():
                slot.forget_snapshot()
                self._note(slot.index, content)
            case requests.WriteBegan():
                slot.writing = True
            case requests.WriteEnded():
                slot.writing, slot.written = False, content.answer
            case requests.WorkerAnswer():
                self._handle_result(slot, content)
            case requests.CloseFailed():
                pass  # another event gives the reason why the worker ended

    def _handle_result(self, slot: WorkerSlot, content: requests.WorkerAnswer) -> None:
        request = slot.finish_call(content)
        abandoned = content.number in self._abandoned
        self._abandoned.discard(content.number)
        if abandoned or isinstance(request, requests.CollectRequest):
            content.result(f"worker {slot.index}")
        if not abandoned:
            self._results[content.number] = content

    # --- deaths

    def _replace(self, slot: WorkerSlot, reason: str) -> None:
        if slot.written is not None:
            self.batches.append(slot.finish(slot.written))
        slot.forget_worker()
        if slot.silent is not None:
            reason = f"did not respond for {slot.silent:g} s (worker_timeout) and was killed"
            slot.silent = None
        what = f"worker {slot.index} {reason}"
        if slot.writing:
            raise WorkerDied(
                f"{what} while it wrote into the replay buffer. It is unknown whether its frames "
                "are in the buffer, which may stay locked forever: make another buffer. If this "
                "process writes into the buffer (shared=False), such a death does no harm"
            )
        self._limits.check(slot, self.restarts, what)
        slot.restarts += 1
        try:
            self._launch(slot)
        except BaseException as error:
            self._error = WorkerDied(f"{what}, and could not be replaced: {error!r}")
            raise
        warn(
            f"{what}; a new worker takes its place (restart {slot.restarts} of "
            f"{self._limits.each}), and the frames that it was collecting are collected again",
            RuntimeWarning,
        )
