"""The conformance suite of places where workers can live."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np

from trawl.backends.base import Backend, Death, Event, Failed, MakeService, Message, Port, Worker
from trawl.errors import WorkerError
from trawl.testing import puppet
from trawl.testing.puppet import Maker, Puppet

_Test = TypeVar("_Test", bound=Callable[..., None])
_MB = 1 << 20


def needs(*abilities: str) -> Callable[[_Test], _Test]:
    """Marks a test as one for backends with certain abilities."""

    def mark(test: _Test) -> _Test:
        test.__dict__["abilities"] = abilities
        return test

    return mark


class BackendConformance:
    """Tests of all that :mod:`trawl.backends.base` promises, for any backend.

    A subclass says how a backend is made, and what it can do; pytest finds the tests in it. What
    a backend can't do, by what the subclass says, has no tests there. pytest itself is not needed
    to import this, and shows what was compared in a failed test after
    ``pytest.register_assert_rewrite("trawl.testing.backends")`` in ``conftest.py``.

    Attributes:
        isolated: whether each worker has an interpreter of its own, so that messages are copies.
        shares_memory: whether workers can write to memory that is allocated here.
        concurrent: whether workers work while this process does something else.
        kills_by_signal: whether a worker is a process of this machine, so that the reason of its
            death can be the name of a signal.
        patience: seconds after which a test fails that waits for an event. No test takes longer
            for a larger number.
        many: workers in the test of many workers.

    Example:
        >>> from trawl.backends import InlineBackend
        >>> from trawl.testing import BackendConformance
        >>> class TestInline(BackendConformance):
        ...     isolated = False
        ...     concurrent = False
        ...     kills_by_signal = False
        ...
        ...     def new_backend(self):
        ...         return InlineBackend()
        >>> suite = TestInline()  # as pytest does it
        >>> suite.setup_method()
        >>> suite.test_messages_come_in_order()
        >>> suite.teardown_method()
    """

    isolated: bool = True
    shares_memory: bool = True
    concurrent: bool = True
    kills_by_signal: bool = True
    patience: float = 300.0
    many: int = 16

    #: Tests that a subclass leaves out, with the ability that it lacks.
    left_out: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls) -> None:
        cls.left_out = {}
        for name in dir(cls):
            for ability in getattr(getattr(cls, name), "abilities", ()):
                if not getattr(cls, ability):
                    cls.left_out[name] = ability
        for name in cls.left_out:
            setattr(cls, name, None)

    def new_backend(self) -> Backend:
        """A backend, newly made; the suite closes it."""
        raise NotImplementedError

    def setup_method(self) -> None:
        """Makes a backend for a test."""
        self.backend = self.new_backend()
        self._events: dict[Worker, list[Event]] = defaultdict(list)

    def teardown_method(self) -> None:
        """Closes the backend."""
        self.backend.close()

    # --- what tests are made of

    def launch(self, index: int = 0, make: MakeService = Puppet) -> Worker:
        """Starts a worker."""
        return self.backend.launch(index, make)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Takes in events until a condition holds."""
        deadline = time.monotonic() + self.patience
        while not reached():
            left = deadline - time.monotonic()
            assert left > 0, f"nothing more in {self.patience} s; until then: {dict(self._events)}"
            for event in self.backend.wait(left):
                before = self._events[event.worker]
                # The last is enough: nothing may come after it.
                last = before[-1] if before else None
                assert not isinstance(last, Death), f"{event} after {last}"
                before.append(event)

    def messages(self, worker: Worker, count: int) -> list[Any]:
        """The contents of the next so many messages of a worker."""
        events = self._events[worker]
        self.wait_until(lambda: len(events) >= count or self._ended(worker))
        taken, events[:count] = events[:count], []
        return [e.content if isinstance(e, Message) else e for e in taken]

    def message(self, worker: Worker) -> Any:
        """The content of the next message of a worker."""
        (content,) = self.messages(worker, 1)
        return content

    def ask(self, worker: Worker, *order: Any) -> Any:
        """Sends an order that brings one answer; the answer."""
        worker.send(order)
        return self.message(worker)

    def end(self, worker: Worker) -> tuple[list[Any], Failed | None, Death]:
        """The last of a worker: contents of messages, how it failed, and its death."""
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
        """What the suite was told about the backend is what the backend tells."""
        assert self.backend.isolated == self.isolated
        assert self.backend.shares_memory == self.shares_memory

    def test_a_worker_knows_its_index(self) -> None:
        """The number under which a worker is launched is kept."""
        assert self.launch(7).index == 7

    def test_messages_come_in_order(self) -> None:
        """Messages arrive in the order in which they were sent, both ways."""
        worker = self.launch()
        for i in range(300):
            worker.send(("echo", i))
        assert self.messages(worker, 300) == list(range(300))

    def test_messages_wait_for_the_service(self) -> None:
        """What is sent before there is a service comes after what its making sends."""
        worker = self.launch(make=Maker("made"))
        worker.send(("echo", 1))
        assert self.messages(worker, 2) == ["made", 1]

    def test_each_worker_has_its_own_order(self) -> None:
        """Messages of several workers may mix, but not those of one."""
        workers = [self.launch(i) for i in range(3)]
        for worker in workers:
            worker.send(("count", 50))
            worker.send(("echo", worker.index))
        for worker in workers:
            assert self.messages(worker, 51) == [*range(50), worker.index]

    def test_many_workers(self) -> None:
        """Many workers live, and answer, and end at the same time."""
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
        """Two sides that send much while neither receives don't wait for each other."""
        worker = self.launch()
        content = bytes(3 * _MB)
        for _ in range(8):
            worker.send(("echo", content))
            worker.send(("blow", len(content)))
        assert all(got == content for got in self.messages(worker, 16))

    def test_a_flood_of_messages_both_ways(self) -> None:
        """The same with many small messages: more than any buffer of the system takes."""
        worker = self.launch()
        worker.send(("count", 1500))
        content = "x" * 500
        for _ in range(1500):
            worker.send(("echo", content))
        assert self.messages(worker, 1500) == list(range(1500))
        assert set(self.messages(worker, 1500)) == {content}

    @needs("concurrent")
    def test_sending_does_not_wait_for_a_worker_at_work(self) -> None:
        """A worker may be sent more than there is room for, before it takes anything."""
        worker = self.launch()
        assert self.ask(worker, "job", "spin", 1) == "spinning"
        for i in range(1500):
            worker.send(("echo", i))
        worker.send(("echo", bytes(5 * _MB)))
        worker.interrupt(1)
        assert self.messages(worker, 1501) == [1, *range(1500)]
        assert len(self.message(worker)) == 5 * _MB

    @needs("isolated")
    def test_messages_are_copies(self) -> None:
        """What happens to an object after it was sent doesn't matter."""
        worker = self.launch()
        content = [1]
        worker.send(("echo", content))
        content.append(2)
        assert self.message(worker) == [1]

    @needs("isolated")
    def test_what_can_not_be_pickled_is_refused_here(self) -> None:
        """An error at the sender, and the worker lives on."""
        worker = self.launch()
        error = _raised(worker.send, ("echo", lambda: None))
        assert error is not None
        assert self.ask(worker, "echo", 1) == 1

    @needs("isolated")
    def test_what_can_not_be_pickled_is_refused_there(self) -> None:
        """The same in the other direction."""
        worker = self.launch()
        verb, _ = self.ask(worker, "send_unpicklable")
        assert verb == "refused"
        assert self.ask(worker, "echo", 1) == 1

    @needs("isolated")
    def test_what_can_not_be_read_there_is_a_failure(self) -> None:
        """A message that makes no sense to a worker is its end, and not silently."""
        worker = self.launch()
        worker.send(("echo", puppet.Unreadable()))
        _, failed, death = self.end(worker)
        assert failed is not None
        assert "this can't be read" in failed.failure.summary
        assert not death.expected

    @needs("isolated")
    def test_what_can_not_be_read_here_is_a_failure(self) -> None:
        """Nor does a worker stay that sends what makes no sense; others' messages do."""
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
        """A busy service gets its messages all the same."""
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
        """All that is there is handled before the next piece of work."""
        worker = self.launch()
        assert self.ask(worker, "job", "spin", 1) == "spinning"
        worker.send(("job", "tell", "handled"))
        for _ in range(20):
            worker.send(("job", "echo", 0))
        worker.interrupt(1)
        assert self.messages(worker, 2) == [1, 22]

    def test_work_is_done_while_there_is_some(self) -> None:
        """One piece for each job, and none when there is none."""
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
        """It is told, with its traceback, before the death of the worker."""
        worker = self.launch(make=puppet.make_failing)
        failed = self._check_failure(worker, ["before"], "no service", "make_failing")
        assert failed.failure.summary == "ValueError: no service"

    def test_an_exception_in_handle(self) -> None:
        """It is told after all that was sent before, and the service is closed."""
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
        """The same."""
        worker = self.launch()
        worker.send(("job", "fail", "in work"))
        self._check_failure(worker, ["closed"], "in work", "in fail")

    def test_an_exception_of_a_class_of_its_own(self) -> None:
        """An exception that can't be had here is told nevertheless."""
        worker = self.launch()
        worker.send(("fail_oddly", 5))
        failed = self._check_failure(worker, ["closed"], "OwnError: code 5")
        assert "code 5" in str(failed.failure.error("worker 0"))

    def test_an_exception_in_close(self) -> None:
        """A stop that goes wrong is a failure."""
        worker = self.launch(make=puppet.BadlyClosed)
        assert self.ask(worker, "echo", 1) == 1
        worker.stop()
        self._check_failure(worker, ["closed"], "ArithmeticError: in close")

    def test_an_exception_in_close_after_another(self) -> None:
        """The traceback has both, and the service is closed once."""
        worker = self.launch(make=puppet.BadlyClosed)
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
        """The service isn't closed, and the death not expected."""
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        self._check_killed(worker, [])

    @needs("concurrent")
    def test_kill_a_worker_at_work(self) -> None:
        """The same, whatever it does."""
        worker = self.launch()
        assert self.ask(worker, "job", "hang") == "hanging"
        self._check_killed(worker, [])

    @needs("concurrent")
    def test_kill_a_worker_that_is_being_made(self) -> None:
        """The same before there is a service."""
        worker = self.launch(make=puppet.make_hanging)
        assert self.message(worker) == "making"
        self._check_killed(worker, [])

    def test_kill_a_worker_at_once(self) -> None:
        """The same before there is anything."""
        for _ in range(3):
            self._check_killed(self.launch(), [])

    @needs("isolated")
    def test_kill_a_worker_that_sends(self) -> None:
        """What comes of it is a beginning of what it sent, each message whole."""
        worker = self.launch()
        worker.send(("count", 100_000))
        assert self.messages(worker, 10) == list(range(10))
        worker.kill()
        contents, failed, _ = self.end(worker)
        assert failed is None
        assert contents == list(range(10, 10 + len(contents)))

    @needs("isolated")
    def test_what_was_sent_comes_before_a_sudden_death(self) -> None:
        """Nothing that a worker sent is lost with it."""
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
        """A worker that dies of a signal has its name in the reason."""
        worker = self.launch()
        worker.send(("crash",))
        _, failed, death = self.end(worker)
        assert (failed, death.reason) == (None, "was killed by SIGSEGV")
        assert not death.expected

    @needs("isolated")
    def test_a_worker_that_dies_while_messages_are_sent_to_it(self) -> None:
        """It is no error, and brings one death."""
        worker = self.launch()
        worker.send(("vanish", 1))
        for i in range(1500):
            worker.send(("echo", i))
            worker.send(("echo", bytes(20_000) if i % 100 == 0 else b""))
        contents, _, _ = self.end(worker)
        assert contents == []

    def test_a_dead_worker_takes_anything(self) -> None:
        """Orders to a worker that is dead, and known to be, do nothing."""
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
        """The same index, again and again; the others are not concerned."""
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
        """The service is closed, once."""
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        self._check_stopped(worker, ["closed"])

    @needs("concurrent")
    def test_stop_a_worker_at_work(self) -> None:
        """What it does is broken off."""
        worker = self.launch()
        assert self.ask(worker, "job", "hang") == "hanging"
        self._check_stopped(worker, ["closed"])

    @needs("concurrent")
    def test_stop_a_worker_with_a_message(self) -> None:
        """Also while it handles a message."""
        worker = self.launch()
        assert self.ask(worker, "hang") == "hanging"
        self._check_stopped(worker, ["closed"])

    @needs("concurrent")
    def test_stop_a_worker_that_is_being_made(self) -> None:
        """There is nothing to close then."""
        worker = self.launch(make=puppet.make_hanging)
        assert self.message(worker) == "making"
        self._check_stopped(worker, [])

    @needs("concurrent")
    def test_stop_a_worker_that_catches_everything(self) -> None:
        """Code in which a stop gets lost doesn't keep the worker from ending."""
        worker = self.launch()
        assert self.ask(worker, "job", "resist") == "hanging"
        self._check_stopped(worker, [("caught", False), "closed"])

    def test_stop_a_worker_at_once(self) -> None:
        """Whether there is a service yet or not, it ends as it was told to."""
        for _ in range(3):
            worker = self.launch()
            worker.stop()
            contents, failed, death = self.end(worker)
            assert contents in ([], ["closed"])
            assert (failed, death.expected) == (None, True)

    def test_stop_in_the_middle_of_a_message(self) -> None:
        """Neither the order nor what is said meanwhile gets lost: it ends soon, and as told to."""
        for _ in range(5):
            worker = self.launch()
            assert self.ask(worker, "echo", 1) == 1
            worker.send(("echo", 2))
            worker.stop()
            contents, failed, death = self.end(worker)
            assert contents in ([2, "closed"], ["closed"])
            assert (failed, death.expected) == (None, True)

    def test_stop_twice(self) -> None:
        """The second time is as good as none."""
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        worker.stop()
        self._check_stopped(worker, ["closed"])

    # --- interruptions

    def test_interruptions_are_seen(self) -> None:
        """The last number counts; it is 0 at first."""
        worker = self.launch()
        assert self.ask(worker, "interrupted") == 0
        worker.interrupt(3)
        assert self.ask(worker, "interrupted") == 3
        worker.interrupt(8)
        worker.interrupt(9)
        assert self.ask(worker, "interrupted") == 9

    @needs("concurrent")
    def test_interruptions_are_seen_at_work(self) -> None:
        """A worker need not take messages to see one."""
        worker, other = self.launch(0), self.launch(1)
        assert self.ask(worker, "job", "spin", 5) == "spinning"
        worker.interrupt(2)
        worker.interrupt(5)
        assert self.message(worker) == 5
        assert self.ask(other, "interrupted") == 0

    # --- memory

    @needs("shares_memory")
    def test_memory_is_zero_at_first(self) -> None:
        """And of the size that was asked for, or a little more."""
        for nbytes in (0, 1, 1000, 3 * _MB):
            memory = self.backend.allocate(nbytes)
            found = bytes(memory.buffer)
            assert len(found) >= nbytes
            assert not any(found)

    @needs("shares_memory")
    def test_memory_is_shared(self) -> None:
        """What one side writes, the other sees; also with several workers."""
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
        """Each name is a piece of memory; unknown ones are errors, and so are old ones."""
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
        """A view of it, on either side, is enough."""
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
        """An empty list, when time is up, with workers or without."""
        assert self.backend.wait(0) == []
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        assert self.backend.wait(0) == []
        assert self.backend.wait(0.01) == []

    @needs("concurrent")
    def test_a_wait_is_not_cut_short(self) -> None:
        """An empty list means that the time is up."""
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        began = time.monotonic()
        assert self.backend.wait(0.1) == []
        assert time.monotonic() - began >= 0.1

    def test_there_is_nothing_to_wait_for(self) -> None:
        """An error, rather than for ever."""
        assert isinstance(_raised(self.backend.wait), RuntimeError)
        worker = self.launch()
        worker.kill()
        self.end(worker)
        assert isinstance(_raised(self.backend.wait), RuntimeError)

    # --- the end

    def test_close_ends_all(self) -> None:
        """Whatever workers do, and as often as it is called."""
        idle, killed, stopped = (self.launch(i) for i in range(3))
        assert self.ask(idle, "echo", 1) == 1
        killed.kill()
        stopped.stop()
        self.backend.close()
        self.backend.close()
        assert isinstance(_raised(self.backend.wait), RuntimeError)

    @needs("concurrent")
    def test_close_does_not_wait_for_work(self) -> None:
        """Workers that are at work, or being made, or have much to read or to send, are ended."""
        workers = [self.launch(i) for i in range(3)]
        self.launch(3, puppet.make_hanging)
        assert self.ask(workers[0], "job", "hang") == "hanging"
        workers[1].send(("count", 100_000))
        assert self.ask(workers[2], "hang") == "hanging"
        for _ in range(1500):
            workers[2].send(("echo", bytes(1000)))
        self.backend.close()

    def test_nothing_is_launched_after_close(self) -> None:
        """It is an error, and brings no worker."""
        self.backend.close()
        assert isinstance(_raised(self.launch), RuntimeError)

    # --- what a service can be made by

    def _check_maker(self, make: MakeService, expected: Any) -> None:
        worker = self.launch(make=make)
        assert self.message(worker) == expected
        assert self.ask(worker, "echo", 1) == 1

    def test_made_by_a_lambda(self) -> None:
        """A function without a name."""
        self._check_maker(lambda port: Maker("lambda")(port), "lambda")

    def test_made_by_a_closure(self) -> None:
        """A function within a function, and what it refers to."""
        array, one = np.arange(5), 1

        def make(port: Port) -> Puppet:
            return Maker((array + one).tolist())(port)

        self._check_maker(make, [1, 2, 3, 4, 5])

    def test_made_by_a_part_of_a_function(self) -> None:
        """A function with some of its arguments."""

        def make(what: str, port: Port) -> Puppet:
            return Maker(what)(port)

        self._check_maker(functools.partial(make, "partial"), "partial")

    def test_made_by_a_local_class(self) -> None:
        """A class within a function, and a subclass of it with what ``super`` needs."""

        class Local(Puppet):
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
        """Classes and functions of the script that runs, which no other process can import."""
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
        """An error here, and no worker."""
        lock = threading.Lock()
        assert _raised(self.launch, 0, Maker(lock)) is not None
        assert isinstance(_raised(self.backend.wait), RuntimeError)

    # --- where workers are

    @needs("isolated")
    def test_workers_have_interpreters_of_their_own(self) -> None:
        """What one does to its modules is not seen by others, before or after."""
        workers = [self.launch(i) for i in range(2)]
        for worker in workers:
            assert [self.ask(worker, "tally") for _ in range(3)] == [1, 2, 3]
        again = self.launch(2)
        assert self.ask(again, "tally") == 1
        assert puppet.TALLY == []

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
