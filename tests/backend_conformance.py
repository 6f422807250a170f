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


def needs(*abilities: str) -> Callable[[_Test], _Test]:
    """Marks a test as one for backends with certain abilities only."""

    def mark(test: _Test) -> _Test:
        test.__dict__["abilities"] = abilities
        return test

    return mark


class Basics:
    """Tests of the least that any backend promises, and the parts that all tests need.

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
        repeats: how often workers are ended in the same way.
    """

    isolated: bool = True
    shares_memory: bool = True
    concurrent: bool = True
    kills_by_signal: bool = True
    patience: float = 300.0
    many: int = 16
    flood: int = 1500
    repeats: int = 3

    #: Tests that a subclass leaves out, by name, with the ability that its backend lacks.
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

    def test_messages_come_in_order(self) -> None:
        """Messages arrive in order both ways, also those sent before there is a service."""
        worker = self.launch(make=Maker("made"))
        for i in range(300):
            worker.send(("echo", i))
        assert self.messages(worker, 301) == ["made", *range(300)]

    # --- deaths

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
            worker = self.launch()
            worker.send(("crash",))
            _, failed, death = self.end(worker)
            assert (failed, death.reason, death.expected) == (None, "was killed by SIGSEGV", False)


class Lives(Basics):
    """Tests of how workers begin and end, and where they are: messages travel as elsewhere."""

    # --- messages

    def test_it_is_as_told(self) -> None:
        """The backend has its abilities, and a worker the number with which it is launched."""
        assert self.backend.isolated == self.isolated
        assert self.backend.shares_memory == self.shares_memory
        assert self.launch(7).index == 7

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

    # --- deaths

    def _launch_all(self) -> dict[str, Worker]:
        """Returns workers that do all that a worker may be doing."""
        workers = {"idle": self.launch(0)}
        assert self.ask(workers["idle"], "echo", 1) == 1
        if self.concurrent:
            making = self.launch(1, scripted_service.make_hanging)
            assert self.message(making) == "making"
            workers["being made"] = making
            for index, order in enumerate([("job", "hang"), ("hang",), ("job", "resist")], 2):
                worker = workers[" ".join(order)] = self.launch(index)
                assert self.ask(worker, *order) == "hanging"
        return workers

    def test_kill(self) -> None:
        """A killed worker doesn't close its service, and its death is not expected."""
        workers = self._launch_all()
        for worker in workers.values():
            worker.kill()
        for name, worker in workers.items():
            contents, failed, death = self.end(worker)
            assert (contents, failed, death.expected) == ([], None, False), name
            if self.kills_by_signal:
                assert death.reason == "was killed by SIGKILL"

    def test_an_end_at_once(self) -> None:
        """A worker can be killed or stopped right after its launch."""
        for _ in range(self.repeats):
            killed, stopped = self.launch(0), self.launch(1)
            killed.kill()
            stopped.stop()
            contents, failed, death = self.end(killed)
            assert (contents, failed, death.expected) == ([], None, False)
            contents, failed, death = self.end(stopped)
            assert contents in ([], ["closed"])
            assert (failed, death.expected) == (None, True)

    def test_another_takes_the_place_of_a_dead_worker(self) -> None:
        """An index can be launched again after each death, without an effect on other workers."""
        other = self.launch(1)
        seen = []
        for i in range(self.repeats):
            worker = self.launch(0, Maker(i))
            assert worker not in seen
            seen.append(worker)
            assert self.message(worker) == i
            worker.kill()
            self.end(worker)
        assert self.ask(other, "echo", 1) == 1

    # --- stop

    def test_stop(self) -> None:
        """A stop breaks off what a worker does, and closes its service once, if there is one.

        A second stop does nothing. A worker ends even if its code catches the exception by which
        it is stopped.
        """
        workers = self._launch_all()
        for worker in workers.values():
            worker.stop()
            worker.stop()
        said = {"being made": [], "job resist": [("caught", False), "closed"]}
        for name, worker in workers.items():
            contents, failed, death = self.end(worker)
            assert contents == said.get(name, ["closed"]), name
            assert (failed, death.expected) == (None, True), name

    # --- memory

    @needs("shares_memory")
    def test_memory_is_shared(self) -> None:
        """Memory is zero and large enough; each side sees the other's writes."""
        for nbytes in (0, 1, 1000, 3 * _MB):
            found = bytes(self.backend.allocate(nbytes).buffer)
            assert len(found) >= nbytes
            assert not any(found)
        memory = self.backend.allocate(1000)
        here = np.frombuffer(memory.buffer, np.uint8)
        workers = [self.launch(i) for i in range(2)]
        for worker in workers:
            worker.share(4, memory)
        assert self.ask(workers[0], "fill", 4, 5) == "filled"
        assert (here[:1000] == 5).all()
        here[:] = 6
        assert self.ask(workers[1], "look", 4)[:1000] == bytes([6]) * 1000

    # --- the end

    def test_close_ends_all(self) -> None:
        """Closing ends all workers, and may be done again; nothing is launched after it."""
        idle, killed, stopped = (self.launch(i) for i in range(3))
        assert self.ask(idle, "echo", 1) == 1
        killed.kill()
        stopped.stop()
        self.backend.close()
        self.backend.close()
        assert isinstance(_raised(self.backend.wait), RuntimeError)
        assert isinstance(_raised(self.launch), RuntimeError)

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

    # --- what a service can be made by

    def test_made_by_anything(self) -> None:
        """A lambda, a closure, a part of a function, and local classes can make a service.

        Classes and functions of ``__main__``, which workers can't import, can as well.
        """
        array, one = np.arange(5), 1

        def make(port: Port) -> ScriptedService:
            return Maker((array + one).tolist())(port)

        def make_of(what: str, port: Port) -> ScriptedService:
            return Maker(what)(port)

        class Local(ScriptedService):
            def __init__(self, port: Port) -> None:
                super().__init__(port)
                port.send(self.hello())

            def hello(self) -> str:
                return "local"

        class More(Local):
            def hello(self) -> str:
                return super().hello() + " class"

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
            made: list[tuple[MakeService, Any]] = [
                (lambda port: Maker("lambda")(port), "lambda"),
                (make, [1, 2, 3, 4, 5]),
                (functools.partial(make_of, "partial"), "partial"),
                (More, "local class"),
                (functools.partial(main["_make"], Maker), "main"),
            ]
            workers = [self.launch(index, make) for index, (make, _) in enumerate(made)]
            for worker, (_, expected) in zip(workers, made, strict=True):
                assert self.message(worker) == expected
                assert self.ask(worker, "echo", 1) == 1
        finally:
            for name in main.keys() - before.keys():
                del main[name]

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
                worker.stop()
                assert self.end(worker)[0] == ["closed"]
                self.launch()
                self.backend.close()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert not errors, errors


class Messages(Basics):
    """Tests of how messages travel: all else is as elsewhere."""

    # --- messages

    def test_each_worker_has_its_own_order(self) -> None:
        """Messages of several workers may mix, but those of one worker stay in order."""
        workers = [self.launch(i) for i in range(3)]
        for worker in workers:
            worker.send(("count", 50))
            worker.send(("echo", worker.index))
        for worker in workers:
            assert self.messages(worker, 51) == [*range(50), worker.index]

    def test_large_messages_both_ways_at_once(self) -> None:
        """Messages of any size arrive whole, and two sides that both send don't deadlock."""
        worker = self.launch()
        for size in (0, 1, 1 << 10, 1 << 14, (1 << 14) + 1, 5 * _MB):
            content = np.random.default_rng(size).bytes(size)
            assert self.ask(worker, "echo", content) == content
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

    # --- exceptions

    def test_exceptions(self) -> None:
        """An exception comes with its traceback, after all messages, and before the death.

        The service is closed once, if there is one. A failure of that is shown as well.
        """
        ready, closed = ScriptedService, scripted_service.BadlyClosed
        table: dict[str, tuple[MakeService, list[Any], list[Any], list[str]]] = {
            "made": (scripted_service.make_failing, [], ["before"], ["ValueError: no service"]),
            "in handle": (
                ready,
                [("count", 100), ("fail", "in handle"), ("echo", "never")],
                [*range(100), "closed"],
                ["ValueError: in handle", "in fail"],
            ),
            "in work": (ready, [("job", "fail", "in work")], ["closed"], ["in work", "in fail"]),
            "of its own class": (ready, [("fail_oddly", 5)], ["closed"], ["OwnError: code 5"]),
            "of the program": (ready, [("job", "leave")], ["closed"], ["SystemExit", "enough"]),
            "in close": (closed, [], ["closed"], ["ArithmeticError: in close"]),
            "in close after another": (
                closed,
                [("fail", "the first")],
                ["closed"],
                ["ArithmeticError: in close", "the first"],
            ),
        }
        workers = {}
        for index, (name, (make, orders, _, _)) in enumerate(table.items()):
            workers[name] = self.launch(index, make)
            for order in orders:
                workers[name].send(order)
        assert self.ask(workers["in close"], "echo", 1) == 1
        workers["in close"].stop()
        for name, (_, _, before, texts) in table.items():
            contents, failed, death = self.end(workers[name])
            assert contents == before, name
            assert failed is not None, name
            assert not death.expected, name
            assert all(text in failed.failure.text for text in texts), (name, failed.failure.text)
            error = failed.failure.error("worker 3")
            assert isinstance(error, WorkerError)
            assert "worker 3" in str(error)
            assert failed.failure.summary in str(error)
            if name in ("made", "in handle"):
                assert isinstance(error, ValueError)
                assert failed.failure.summary == texts[0]

    # --- deaths

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

    # --- stop

    def test_stop_in_the_middle_of_a_message(self) -> None:
        """A stop that meets a message in progress is not lost, and the death is expected."""
        for _ in range(self.repeats):
            worker = self.launch()
            assert self.ask(worker, "echo", 1) == 1
            worker.send(("echo", 2))
            worker.stop()
            contents, failed, death = self.end(worker)
            assert contents in ([2, "closed"], ["closed"])
            assert (failed, death.expected) == (None, True)

    # --- interruptions

    def test_interruptions_are_seen(self) -> None:
        """A worker sees the last interruption number, also at work; other workers don't."""
        worker, other = self.launch(0), self.launch(1)
        assert self.ask(worker, "interrupted") == 0
        worker.interrupt(3)
        assert self.ask(worker, "interrupted") == 3
        worker.interrupt(8)
        worker.interrupt(9)
        assert self.ask(worker, "interrupted") == 9
        if self.concurrent:
            assert self.ask(worker, "job", "spin", 15) == "spinning"
            worker.interrupt(12)
            worker.interrupt(15)
            assert self.message(worker) == 15
        assert self.ask(other, "interrupted") == 0


class BackendConformance(Lives, Messages):
    """Tests of all that :mod:`trawl.backends.base` promises, for any backend."""

    # --- messages

    @needs("isolated")
    def test_messages_are_copies(self) -> None:
        """What is changed after it was sent arrives as it was; what can't be pickled is refused."""
        worker = self.launch()
        content = [1]
        worker.send(("echo", content))
        content.append(2)
        assert self.message(worker) == [1]
        assert _raised(worker.send, ("echo", lambda: None)) is not None
        verb, _ = self.ask(worker, "send_unpicklable")
        assert verb == "refused"
        assert self.ask(worker, "echo", 1) == 1

    @needs("isolated")
    def test_what_can_not_be_read_is_a_failure(self) -> None:
        """A message that can't be unpickled, there or here, ends its worker, and no other."""
        there, here, other = (self.launch(i) for i in range(3))
        there.send(("echo", scripted_service.Unreadable()))
        here.send(("send_unreadable",))
        for worker in (there, here):
            _, failed, death = self.end(worker)
            assert failed is not None
            assert "this can't be read" in failed.failure.summary
            assert not death.expected
        assert self.ask(other, "echo", 1) == 1

    # --- turns

    def test_work_is_done_while_there_is_some(self) -> None:
        """A worker does one piece of work for each job, and none without a job."""
        worker = self.launch()
        for i in range(5):
            worker.send(("job", "echo", i))
        assert self.messages(worker, 5) == list(range(5))
        assert self.ask(worker, "tell", "pieces") == 5

    # --- deaths

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

    # --- memory

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
        """A wait returns an empty list after its whole time, with workers or without."""
        assert self.backend.wait(0) == []
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        assert self.backend.wait(0) == []
        began = time.monotonic()
        assert self.backend.wait(0.1) == []
        assert not self.concurrent or time.monotonic() - began >= 0.1

    def test_there_is_nothing_to_wait_for(self) -> None:
        """A wait without a time-out is an error if no event can come."""
        assert isinstance(_raised(self.backend.wait), RuntimeError)
        worker = self.launch()
        worker.kill()
        self.end(worker)
        assert isinstance(_raised(self.backend.wait), RuntimeError)

    # --- what a service can be made by

    @needs("isolated")
    def test_a_maker_that_can_not_be_pickled(self) -> None:
        """A maker that can't be pickled is an error here, and starts no worker."""
        lock = threading.Lock()
        assert _raised(self.launch, 0, Maker(lock)) is not None
        assert isinstance(_raised(self.backend.wait), RuntimeError)


def _raised(function: Callable[..., Any], *args: Any) -> Exception | None:
    try:
        function(*args)
    except Exception as error:
        return error
    return None
