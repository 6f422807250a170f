"""Conformance suite for backends."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np
import scripted_service
from scripted_service import Maker, ScriptedService

from trawl.backends.base import Backend, Death, Event, Failed, MakeService, Message, Port, Worker
from trawl.errors import WorkerError

_Test = TypeVar("_Test", bound=Callable[..., None])
_MB = 1 << 20
#: How the names of the tests of workers' lives begin.
_LIVES = (
    "test_abilities",
    "test_messages_come_in_order",
    "test_many_workers",
    "test_an_exception_while_the_service_is_made",
    "test_made_by_",
    "test_workers_have_interpreters",
    "test_in_another_thread",
    "test_a_program_that_ends",
    "test_kill_",
    "test_a_crash",
    "test_what_was_sent_comes",
    "test_another_takes",
    "test_stop_",
    "test_memory_is_shared",
    "test_close_",
)
#: How the names of the tests of how messages travel begin.
_MESSAGES = (
    "test_messages_come",
    "test_messages_are_handled",
    "test_each_worker_has_its_own_order",
    "test_large_messages_both_ways",
    "test_a_flood",
    "test_sending_does_not_wait",
    "test_an_exception_in_handle",
    "test_what_was_sent_comes",
    "test_a_worker_that_dies_while",
    "test_stop_in_the_middle",
    "test_interruptions_are_seen_at_work",
)


def needs(*abilities: str) -> Callable[[_Test], _Test]:
    """Marks a test as one for backends with certain abilities only."""

    def mark(test: _Test) -> _Test:
        test.__dict__["abilities"] = abilities
        return test

    return mark


class BackendConformance:
    """Tests of all that :mod:`trawl.backends.base` promises, for any backend.

    A subclass makes the backend and states its abilities; pytest finds the tests in the subclass.
    Tests of abilities that the backend lacks are left out. To see the compared values in a failed
    test, call ``pytest.register_assert_rewrite("backend_conformance")`` in ``conftest.py``.

    Attributes:
        isolated: whether each worker has an interpreter of its own, so that messages are copies.
        shares_memory: whether workers can write to memory that the backend allocates in this
            process.
        concurrent: whether workers work while this process does something else.
        kills_by_signal: whether a worker is a process of this machine, so that the reason of its
            death can be the name of a signal.
        patience: seconds after which a test that waits for an event fails. A larger number slows
            no passing test down.
        many: number of workers in the test of many workers.
        flood: number of messages that are sent at once; they are longer if there are fewer.
        lives_only: whether to test only how workers begin and end, and where they are, because
            messages travel as in another backend.
        messages_only: whether to test only how messages travel, because all else is as in another
            backend.
    """

    isolated: bool = True
    shares_memory: bool = True
    concurrent: bool = True
    kills_by_signal: bool = True
    patience: float = 300.0
    many: int = 16
    flood: int = 1500
    lives_only: bool = False
    messages_only: bool = False

    #: Tests that a subclass leaves out, by name, with the ability that its backend lacks.
    left_out: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls) -> None:
        cls.left_out = {}
        for name in dir(cls):
            for ability in getattr(getattr(cls, name), "abilities", ()):
                if not getattr(cls, ability):
                    cls.left_out[name] = ability
            for only, names in (("lives_only", _LIVES), ("messages_only", _MESSAGES)):
                inherited = hasattr(BackendConformance, name) and name.startswith("test_")
                if getattr(cls, only) and inherited and not name.startswith(names):
                    cls.left_out[name] = only
        for name in cls.left_out:
            setattr(cls, name, None)

    def new_backend(self) -> Backend:
        """Returns a new backend; the suite closes it."""
        raise NotImplementedError

    def setup_method(self) -> None:
        """Makes a backend for a test."""
        self.backend = self.new_backend()
        self._events: dict[Worker, list[Event]] = defaultdict(list)

    def teardown_method(self) -> None:
        """Closes the backend."""
        self.backend.close()

    # --- parts of tests

    def launch(self, index: int = 0, make: MakeService = ScriptedService) -> Worker:
        """Starts a worker."""
        return self.backend.launch(index, make)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Collects events until a condition holds."""
        deadline = time.monotonic() + self.patience
        while not reached():
            left = deadline - time.monotonic()
            assert left > 0, f"nothing more in {self.patience} s; until then: {dict(self._events)}"
            for event in self.backend.wait(left):
                before = self._events[event.worker]
                # Nothing may come after a death, so it is enough to look at the last event.
                last = before[-1] if before else None
                assert not isinstance(last, Death), f"{event} after {last}"
                before.append(event)

    def wait_arrived(self, worker: Worker) -> None:
        """Waits until the worker has what was sent to it, which it may not have read yet.

        By default what was sent has arrived.
        """

    def messages(self, worker: Worker, count: int) -> list[Any]:
        """Returns the contents of the next ``count`` messages of a worker."""
        events = self._events[worker]
        self.wait_until(lambda: len(events) >= count or self._ended(worker))
        taken, events[:count] = events[:count], []
        return [e.content if isinstance(e, Message) else e for e in taken]

    def message(self, worker: Worker) -> Any:
        """Returns the content of the next message of a worker."""
        (content,) = self.messages(worker, 1)
        return content

    def ask(self, worker: Worker, *order: Any) -> Any:
        """Sends a request that brings one answer, and returns the answer."""
        worker.send(order)
        return self.message(worker)

    def end(self, worker: Worker) -> tuple[list[Any], Failed | None, Death]:
        """Waits for a worker's death; returns its last messages, its failure and its death."""
        self.wait_until(lambda: self._ended(worker))
        *events, death = self._events.pop(worker)
        assert isinstance(death, Death)
        failed = events.pop() if events and isinstance(events[-1], Failed) else None
        assert failed is None or isinstance(failed, Failed)
        contents = [e.content if isinstance(e, Message) else e for e in events]
        return contents, failed, death

    def _ended(self, worker: Worker) -> bool:
        events = self._events[worker]
        return bool(events) and isinstance(events[-1], Death)

    # --- messages

    def test_abilities_are_as_told(self) -> None:
        """The backend has the abilities that the subclass states."""
        assert self.backend.isolated == self.isolated
        assert self.backend.shares_memory == self.shares_memory

    def test_a_worker_knows_its_index(self) -> None:
        """A worker keeps the number with which it is launched."""
        assert self.launch(7).index == 7

    def test_messages_come_in_order(self) -> None:
        """Messages arrive in the order in which they were sent, in both directions."""
        worker = self.launch()
        for i in range(300):
            worker.send(("echo", i))
        assert self.messages(worker, 300) == list(range(300))

    def test_messages_wait_for_the_service(self) -> None:
        """Messages sent before there is a service wait until the service is made."""
        worker = self.launch(make=Maker("made"))
        worker.send(("echo", 1))
        assert self.messages(worker, 2) == ["made", 1]

    def test_each_worker_has_its_own_order(self) -> None:
        """Messages of several workers may mix, but those of one worker stay in order."""
        workers = [self.launch(i) for i in range(3)]
        for worker in workers:
            worker.send(("count", 50))
            worker.send(("echo", worker.index))
        for worker in workers:
            assert self.messages(worker, 51) == [*range(50), worker.index]

    def test_many_workers(self) -> None:
        """Many workers run, answer and end at the same time."""
        workers = [self.launch(i, Maker(i)) for i in range(self.many)]
        for worker in workers:
            assert self.message(worker) == worker.index
        for worker in workers:
            worker.send(("echo", [worker.index]))
        for worker in workers:
            assert self.message(worker) == [worker.index]
        for worker in workers:
            worker.stop()
        for worker in workers:
            contents, failed, death = self.end(worker)
            assert (contents, failed, death.expected) == (["closed"], None, True)

    def test_large_messages(self) -> None:
        """Messages of any size arrive whole."""
        worker = self.launch()
        for size in (0, 1, 1 << 10, 1 << 14, (1 << 14) + 1, 5 * _MB):
            content = np.random.default_rng(size).bytes(size)
            assert self.ask(worker, "echo", content) == content

    def test_large_messages_both_ways_at_once(self) -> None:
        """Two sides that both send large messages before either receives don't deadlock."""
        worker = self.launch()
        content = bytes(3 * _MB)
        for _ in range(8):
            worker.send(("echo", content))
            worker.send(("blow", len(content)))
        assert all(got == content for got in self.messages(worker, 16))

    def test_a_flood_of_messages_both_ways(self) -> None:
        """Many small messages don't deadlock, even if they exceed all buffers of the system."""
        worker = self.launch()
        worker.send(("count", self.flood))
        content = "x" * (750_000 // self.flood)
        for _ in range(self.flood):
            worker.send(("echo", content))
        assert self.messages(worker, self.flood) == list(range(self.flood))
        assert set(self.messages(worker, self.flood)) == {content}

    @needs("concurrent")
    def test_sending_does_not_wait_for_a_worker_at_work(self) -> None:
        """A busy worker may be sent more messages than there is buffer space for."""
        worker = self.launch()
        assert self.ask(worker, "job", "spin", 1) == "spinning"
        for i in range(self.flood):
            worker.send(("echo", i))
        worker.send(("echo", bytes(5 * _MB)))
        worker.interrupt(1)
        assert self.messages(worker, self.flood + 1) == [1, *range(self.flood)]
        assert len(self.message(worker)) == 5 * _MB

    @needs("isolated")
    def test_messages_are_copies(self) -> None:
        """A change of an object after it was sent does not reach the other side."""
        worker = self.launch()
        content = [1]
        worker.send(("echo", content))
        content.append(2)
        assert self.message(worker) == [1]

    @needs("isolated")
    def test_what_can_not_be_pickled_is_refused_here(self) -> None:
        """A message that can't be pickled is an error here, and the worker goes on."""
        worker = self.launch()
        error = _raised(worker.send, ("echo", lambda: None))
        assert error is not None
        assert self.ask(worker, "echo", 1) == 1

    @needs("isolated")
    def test_what_can_not_be_pickled_is_refused_there(self) -> None:
        """A message that can't be pickled is an error in the worker, which goes on."""
        worker = self.launch()
        verb, _ = self.ask(worker, "send_unpicklable")
        assert verb == "refused"
        assert self.ask(worker, "echo", 1) == 1

    @needs("isolated")
    def test_what_can_not_be_read_there_is_a_failure(self) -> None:
        """A message that a worker can't unpickle ends the worker with a failure."""
        worker = self.launch()
        worker.send(("echo", scripted_service.Unreadable()))
        _, failed, death = self.end(worker)
        assert failed is not None
        assert "this can't be read" in failed.failure.summary
        assert not death.expected

    @needs("isolated")
    def test_what_can_not_be_read_here_is_a_failure(self) -> None:
        """A message that can't be unpickled here ends its sender with a failure, and no other."""
        worker, other = self.launch(0), self.launch(1)
        worker.send(("send_unreadable",))
        other.send(("echo", 1))
        _, failed, death = self.end(worker)
        assert failed is not None
        assert "this can't be read" in failed.failure.summary
        assert not death.expected
        assert self.message(other) == 1

    # --- turns

    def test_messages_are_handled_between_two_pieces_of_work(self) -> None:
        """A busy service gets its messages between two pieces of work."""
        worker = self.launch()
        worker.send(("run", True))
        assert self.messages(worker, 3) == [("piece", 1), ("piece", 2), ("piece", 3)]
        worker.send(("run", False))
        worker.send(("echo", "idle"))
        self.wait_until(lambda: Message(worker, "idle") in self._events[worker])
        *pieces, _ = [e.content for e in self._events.pop(worker) if isinstance(e, Message)]
        assert pieces == [("piece", i + 4) for i in range(len(pieces))]
        assert self.ask(worker, "tell", "pieces") == len(pieces) + 3

    @needs("concurrent")
    def test_messages_come_before_work(self) -> None:
        """All messages that have arrived are handled before the next piece of work."""
        worker = self.launch()
        assert self.ask(worker, "job", "spin", 1) == "spinning"
        self.wait_arrived(worker)
        worker.send(("job", "tell", "handled"))
        for _ in range(20):
            worker.send(("job", "echo", 0))
        self.wait_arrived(worker)
        worker.interrupt(1)
        assert self.messages(worker, 2) == [1, 22]

    def test_work_is_done_while_there_is_some(self) -> None:
        """A worker does one piece of work for each job, and none without a job."""
        worker = self.launch()
        for i in range(5):
            worker.send(("job", "echo", i))
        assert self.messages(worker, 5) == list(range(5))
        assert self.ask(worker, "tell", "pieces") == 5

    # --- exceptions

    def _check_failure(self, worker: Worker, before: list[Any], *text: str) -> Failed:
        contents, failed, death = self.end(worker)
        assert contents == before
        assert failed is not None
        assert not death.expected
        for part in text:
            assert part in failed.failure.text
        return failed

    def test_an_exception_while_the_service_is_made(self) -> None:
        """The exception is reported, with its traceback, before the death of the worker."""
        worker = self.launch(make=scripted_service.make_failing)
        failed = self._check_failure(worker, ["before"], "no service", "make_failing")
        assert failed.failure.summary == "ValueError: no service"

    def test_an_exception_in_handle(self) -> None:
        """The exception is reported after all earlier messages, and the service is closed."""
        worker = self.launch()
        worker.send(("count", 100))
        worker.send(("fail", "in handle"))
        worker.send(("echo", "never"))
        failed = self._check_failure(worker, [*range(100), "closed"], "in handle", "in fail")
        error = failed.failure.error("worker 0")
        assert isinstance(error, WorkerError)
        assert isinstance(error, ValueError)
        assert "worker 0" in str(error)

    def test_an_exception_in_work(self) -> None:
        """The exception is reported, and the service is closed."""
        worker = self.launch()
        worker.send(("job", "fail", "in work"))
        self._check_failure(worker, ["closed"], "in work", "in fail")

    def test_an_exception_of_a_class_of_its_own(self) -> None:
        """An exception that can't be unpickled is reported nevertheless."""
        worker = self.launch()
        worker.send(("fail_oddly", 5))
        failed = self._check_failure(worker, ["closed"], "OwnError: code 5")
        assert "code 5" in str(failed.failure.error("worker 0"))

    def test_an_exception_in_close(self) -> None:
        """An exception in ``close`` makes a stop a failure."""
        worker = self.launch(make=scripted_service.BadlyClosed)
        assert self.ask(worker, "echo", 1) == 1
        worker.stop()
        self._check_failure(worker, ["closed"], "ArithmeticError: in close")

    def test_an_exception_in_close_after_another(self) -> None:
        """The failure shows both exceptions, and the service is closed once."""
        worker = self.launch(make=scripted_service.BadlyClosed)
        worker.send(("fail", "the first"))
        self._check_failure(worker, ["closed"], "ArithmeticError: in close", "the first")

    def test_a_program_that_ends_itself(self) -> None:
        """``sys.exit`` in a worker is a failure of the worker."""
        worker = self.launch()
        worker.send(("job", "leave"))
        self._check_failure(worker, ["closed"], "SystemExit", "enough")

    # --- deaths

    def _check_killed(self, worker: Worker, before: list[Any]) -> None:
        worker.kill()
        contents, failed, death = self.end(worker)
        assert (contents, failed, death.expected) == (before, None, False)
        if self.kills_by_signal:
            assert death.reason == "was killed by SIGKILL"

    def test_kill_an_idle_worker(self) -> None:
        """A killed worker doesn't close its service, and its death is not expected."""
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        self._check_killed(worker, [])

    @needs("concurrent")
    def test_kill_a_worker_at_work(self) -> None:
        """A worker can be killed while it works."""
        worker = self.launch()
        assert self.ask(worker, "job", "hang") == "hanging"
        self._check_killed(worker, [])

    @needs("concurrent")
    def test_kill_a_worker_that_is_being_made(self) -> None:
        """A worker can be killed before it has a service."""
        worker = self.launch(make=scripted_service.make_hanging)
        assert self.message(worker) == "making"
        self._check_killed(worker, [])

    def test_kill_a_worker_at_once(self) -> None:
        """A worker can be killed right after its launch."""
        for _ in range(3):
            self._check_killed(self.launch(), [])

    @needs("isolated")
    def test_kill_a_worker_that_sends(self) -> None:
        """The first messages of a killed worker arrive, without gaps, and each complete."""
        worker = self.launch()
        worker.send(("count", 100_000))
        assert self.messages(worker, 10) == list(range(10))
        worker.kill()
        contents, failed, _ = self.end(worker)
        assert failed is None
        assert contents == list(range(10, 10 + len(contents)))

    @needs("isolated")
    def test_what_was_sent_comes_before_a_sudden_death(self) -> None:
        """All messages of a worker arrive, even if it then ends without notice."""
        worker = self.launch()
        worker.send(("count", 100))
        worker.send(("blow", _MB))
        worker.send(("vanish", 3))
        contents, failed, death = self.end(worker)
        assert contents == [*range(100), bytes(_MB)]
        assert failed is None
        assert not death.expected
        if self.kills_by_signal:
            assert death.reason == "exited with status 3"

    @needs("kills_by_signal")
    def test_a_crash_is_named(self) -> None:
        """The reason of a death by a signal has the signal's name."""
        worker = self.launch()
        worker.send(("crash",))
        _, failed, death = self.end(worker)
        assert (failed, death.reason) == (None, "was killed by SIGSEGV")
        assert not death.expected

    @needs("isolated")
    def test_a_worker_that_dies_while_messages_are_sent_to_it(self) -> None:
        """Sending to a worker that dies is no error, and the death is reported once."""
        worker = self.launch()
        worker.send(("vanish", 1))
        for i in range(1500):
            worker.send(("echo", i))
            worker.send(("echo", bytes(20_000) if i % 100 == 0 else b""))
        contents, _, _ = self.end(worker)
        assert contents == []

    def test_a_dead_worker_takes_anything(self) -> None:
        """Calls to a worker that is known to be dead do nothing."""
        worker, other = self.launch(0), self.launch(1)
        worker.kill()
        self.end(worker)
        memory = self.backend.allocate(10)
        worker.send(("echo", 1))
        worker.share(1, memory)
        worker.forget(1)
        worker.interrupt(1)
        worker.stop()
        worker.kill()
        assert self.ask(other, "echo", 1) == 1
        assert worker not in self._events

    def test_another_takes_the_place_of_a_dead_worker(self) -> None:
        """An index can be launched again after each death, without an effect on other workers."""
        other = self.launch(1)
        seen = []
        for i in range(4):
            worker = self.launch(0, Maker(i))
            assert worker not in seen
            seen.append(worker)
            assert self.message(worker) == i
            worker.kill()
            self.end(worker)
        assert self.ask(other, "echo", 1) == 1

    # --- stop

    def _check_stopped(self, worker: Worker, before: list[Any]) -> None:
        worker.stop()
        contents, failed, death = self.end(worker)
        assert (contents, failed, death.expected) == (before, None, True)

    def test_stop_an_idle_worker(self) -> None:
        """A stop closes the service of an idle worker, once."""
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        self._check_stopped(worker, ["closed"])

    @needs("concurrent")
    def test_stop_a_worker_at_work(self) -> None:
        """A stop breaks off the work of a worker."""
        worker = self.launch()
        assert self.ask(worker, "job", "hang") == "hanging"
        self._check_stopped(worker, ["closed"])

    @needs("concurrent")
    def test_stop_a_worker_with_a_message(self) -> None:
        """A stop breaks off the handling of a message."""
        worker = self.launch()
        assert self.ask(worker, "hang") == "hanging"
        self._check_stopped(worker, ["closed"])

    @needs("concurrent")
    def test_stop_a_worker_that_is_being_made(self) -> None:
        """A stop ends a worker whose service is still being made, and closes nothing."""
        worker = self.launch(make=scripted_service.make_hanging)
        assert self.message(worker) == "making"
        self._check_stopped(worker, [])

    @needs("concurrent")
    def test_stop_a_worker_that_catches_everything(self) -> None:
        """A worker ends even if its code catches the exception by which it is stopped."""
        worker = self.launch()
        assert self.ask(worker, "job", "resist") == "hanging"
        self._check_stopped(worker, [("caught", False), "closed"])

    def test_stop_a_worker_at_once(self) -> None:
        """A worker that is stopped right after its launch ends as expected."""
        for _ in range(3):
            worker = self.launch()
            worker.stop()
            contents, failed, death = self.end(worker)
            assert contents in ([], ["closed"])
            assert (failed, death.expected) == (None, True)

    def test_stop_in_the_middle_of_a_message(self) -> None:
        """A stop that meets a message in progress is not lost, and the death is expected."""
        for _ in range(5):
            worker = self.launch()
            assert self.ask(worker, "echo", 1) == 1
            worker.send(("echo", 2))
            worker.stop()
            contents, failed, death = self.end(worker)
            assert contents in ([2, "closed"], ["closed"])
            assert (failed, death.expected) == (None, True)

    def test_stop_twice(self) -> None:
        """A second stop does nothing."""
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        worker.stop()
        self._check_stopped(worker, ["closed"])

    # --- interruptions

    def test_interruptions_are_seen(self) -> None:
        """A worker sees the last interruption number, which is 0 at first."""
        worker = self.launch()
        assert self.ask(worker, "interrupted") == 0
        worker.interrupt(3)
        assert self.ask(worker, "interrupted") == 3
        worker.interrupt(8)
        worker.interrupt(9)
        assert self.ask(worker, "interrupted") == 9

    @needs("concurrent")
    def test_interruptions_are_seen_at_work(self) -> None:
        """A worker sees an interruption during its work, and other workers don't."""
        worker, other = self.launch(0), self.launch(1)
        assert self.ask(worker, "job", "spin", 5) == "spinning"
        worker.interrupt(2)
        worker.interrupt(5)
        assert self.message(worker) == 5
        assert self.ask(other, "interrupted") == 0

    # --- memory

    @needs("shares_memory")
    def test_memory_is_zero_at_first(self) -> None:
        """Allocated memory is zero, and has at least the size that was asked for."""
        for nbytes in (0, 1, 1000, 3 * _MB):
            memory = self.backend.allocate(nbytes)
            found = bytes(memory.buffer)
            assert len(found) >= nbytes
            assert not any(found)

    @needs("shares_memory")
    def test_memory_is_shared(self) -> None:
        """Each side sees the other's writes, with several workers, too."""
        memory = self.backend.allocate(1000)
        here = np.frombuffer(memory.buffer, np.uint8)
        workers = [self.launch(i) for i in range(2)]
        for worker in workers:
            worker.share(4, memory)
        assert self.ask(workers[0], "fill", 4, 5) == "filled"
        assert (here[:1000] == 5).all()
        here[:] = 6
        assert self.ask(workers[1], "look", 4)[:1000] == bytes([6]) * 1000

    @needs("shares_memory")
    def test_memory_has_names(self) -> None:
        """Each name leads to its memory; unknown and forgotten names are errors."""
        worker = self.launch()
        for name in (1, 2):
            memory = self.backend.allocate(10)
            np.frombuffer(memory.buffer, np.uint8)[:] = name
            worker.share(name, memory)
        del memory
        assert self.ask(worker, "look", 1)[:10] == bytes([1]) * 10
        assert self.ask(worker, "look", 2)[:10] == bytes([2]) * 10
        assert self.ask(worker, "look", 3) is None
        worker.forget(1)
        assert self.ask(worker, "look", 1) is None
        assert self.ask(worker, "look", 2)[:10] == bytes([2]) * 10
        worker.share(1, self.backend.allocate(10))
        assert self.ask(worker, "look", 1)[:10] == bytes(10)
        worker.forget(99)
        assert self.ask(worker, "look", 99) is None

    @needs("shares_memory")
    def test_memory_is_there_as_long_as_it_is_used(self) -> None:
        """A view of the memory, on either side, keeps it alive."""
        memory = self.backend.allocate(100)
        here = np.frombuffer(memory.buffer, np.uint8)
        worker = self.launch()
        worker.share(1, memory)
        worker.send(("keep", 1))
        worker.forget(1)
        del memory
        assert self.ask(worker, "fill_kept", 7) == "filled"
        assert (here == 7).all()
        worker.kill()
        self.end(worker)
        self.backend.close()
        assert (here == 7).all()

    # --- waiting

    def test_a_wait_may_bring_nothing(self) -> None:
        """A wait returns an empty list if nothing happens in time, with workers or without."""
        assert self.backend.wait(0) == []
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        assert self.backend.wait(0) == []
        assert self.backend.wait(0.01) == []

    @needs("concurrent")
    def test_a_wait_is_not_cut_short(self) -> None:
        """A wait returns an empty list only after its whole time."""
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        began = time.monotonic()
        assert self.backend.wait(0.1) == []
        assert time.monotonic() - began >= 0.1

    def test_there_is_nothing_to_wait_for(self) -> None:
        """A wait without a time-out is an error if no event can come."""
        assert isinstance(_raised(self.backend.wait), RuntimeError)
        worker = self.launch()
        worker.kill()
        self.end(worker)
        assert isinstance(_raised(self.backend.wait), RuntimeError)

    # --- the end

    def test_close_ends_all(self) -> None:
        """Closing ends all workers, and may be done again."""
        idle, killed, stopped = (self.launch(i) for i in range(3))
        assert self.ask(idle, "echo", 1) == 1
        killed.kill()
        stopped.stop()
        self.backend.close()
        self.backend.close()
        assert isinstance(_raised(self.backend.wait), RuntimeError)

    @needs("concurrent")
    def test_close_does_not_wait_for_work(self) -> None:
        """Closing ends workers that work, are being made, or have much to read or to send."""
        workers = [self.launch(i) for i in range(3)]
        self.launch(3, scripted_service.make_hanging)
        assert self.ask(workers[0], "job", "hang") == "hanging"
        workers[1].send(("count", 100_000))
        assert self.ask(workers[2], "hang") == "hanging"
        for _ in range(self.flood):
            workers[2].send(("echo", bytes(1000)))
        self.backend.close()

    def test_nothing_is_launched_after_close(self) -> None:
        """A launch after close is an error."""
        self.backend.close()
        assert isinstance(_raised(self.launch), RuntimeError)

    # --- what a service can be made by

    def _check_maker(self, make: MakeService, expected: Any) -> None:
        worker = self.launch(make=make)
        assert self.message(worker) == expected
        assert self.ask(worker, "echo", 1) == 1

    def test_made_by_a_lambda(self) -> None:
        """A lambda can make a service."""
        self._check_maker(lambda port: Maker("lambda")(port), "lambda")

    def test_made_by_a_closure(self) -> None:
        """A closure can make a service, together with the variables it refers to."""
        array, one = np.arange(5), 1

        def make(port: Port) -> ScriptedService:
            return Maker((array + one).tolist())(port)

        self._check_maker(make, [1, 2, 3, 4, 5])

    def test_made_by_a_part_of_a_function(self) -> None:
        """A ``functools.partial`` can make a service."""

        def make(what: str, port: Port) -> ScriptedService:
            return Maker(what)(port)

        self._check_maker(functools.partial(make, "partial"), "partial")

    def test_made_by_a_local_class(self) -> None:
        """A local class can make a service, as can a subclass of it that uses ``super``."""

        class Local(ScriptedService):
            def __init__(self, port: Port) -> None:
                super().__init__(port)
                port.send(self.hello())

            def hello(self) -> str:
                return "local"

        class More(Local):
            def hello(self) -> str:
                return super().hello() + " class"

        self._check_maker(More, "local class")

    def test_made_by_what_main_defines(self) -> None:
        """Classes and functions of ``__main__``, which workers can't import, can make a service."""
        main = sys.modules["__main__"].__dict__
        source = (
            "class _Named:\n"
            "    def __init__(self, name): self.name = name\n"
            "def _named(name): return _Named(name)\n"
            "def _make(maker, port): return maker(_named('main').name)(port)\n"
        )
        before = dict(main)
        exec(source, main)
        try:
            make: MakeService = functools.partial(main["_make"], Maker)
            self._check_maker(make, "main")
        finally:
            for name in main.keys() - before.keys():
                del main[name]

    @needs("isolated")
    def test_a_maker_that_can_not_be_pickled(self) -> None:
        """A maker that can't be pickled is an error here, and starts no worker."""
        lock = threading.Lock()
        assert _raised(self.launch, 0, Maker(lock)) is not None
        assert isinstance(_raised(self.backend.wait), RuntimeError)

    # --- where workers are

    @needs("isolated")
    def test_workers_have_interpreters_of_their_own(self) -> None:
        """Changes that a worker makes to its modules are not seen by other workers."""
        workers = [self.launch(i) for i in range(2)]
        for worker in workers:
            assert [self.ask(worker, "tally") for _ in range(3)] == [1, 2, 3]
        again = self.launch(2)
        assert self.ask(again, "tally") == 1
        assert scripted_service.TALLY == []

    def test_in_another_thread(self) -> None:
        """A backend may be used in any one thread."""
        errors = []

        def use() -> None:
            try:
                worker = self.launch()
                assert self.ask(worker, "echo", 1) == 1
                self._check_stopped(worker, ["closed"])
                self.launch()
                self.backend.close()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert not errors, errors


def _raised(function: Callable[..., Any], *args: Any) -> Exception | None:
    try:
        function(*args)
    except Exception as error:
        return error
    return None
