"""Weight-sync schemes between processes of the user's own, however these are started."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest
from weight_parts import (
    METHODS,
    PATIENCE,
    Other,
    Uniform,
    Whole,
    answering,
    numbers,
    other,
)

from trawl.weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
)

BOTH = pytest.mark.parametrize(
    "kind",
    [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, DistributedWeightSyncScheme],
    ids=["shared", "process", "distributed"],
)
OF_SHARED_MEMORY = BOTH.args[1][:2]
# Python warns of a fork while there are threads; pytest may have some.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def receive(connection: Any, scheme: Any, index: int) -> None:
    """A receiver: asked for weights, it says what it has then, and what was returned."""
    model = Whole(0)
    scheme.init_on_receiver(model=model, worker_idx=index)
    scheme.connect()
    connection.send("ready")

    def answer(timeout: float | None) -> Any:
        found = scheme.receive(timeout)
        if found is not None:
            assert found["part", "__extra_state__", "said"] == model.part.said
            assert numbers(found) == model.part.numbers
        return model.part.numbers, model.part.said, found is not None

    answering(connection, answer)


def send(connection: Any, kind: Any) -> None:
    """A sender with a receiver: gives the receiver's process its end, and sends when it is told."""
    scheme = kind()
    scheme.init_on_sender(model=Whole(0))
    method = "fork" if kind in OF_SHARED_MEMORY else "forkserver"
    with other(receive_and_report, scheme, connection, method=method) as receiver:
        scheme.connect()
        assert receiver.hear() == "ready"

        def answer(number: float) -> Any:
            scheme.send(Whole(number))
            return receiver.hear()

        answering(connection, answer)


def receive_and_report(connection: Any, scheme: Any, elsewhere: Any) -> None:
    """A receiver: tells the sender of weights, and another process of the sender's end."""
    model = Whole(0)
    scheme.init_on_receiver(model=model)
    scheme.connect()
    connection.send("ready")
    try:
        while True:
            scheme.receive()
            connection.send(model.part.numbers)
    except ConnectionError as error:
        elsewhere.send(str(error))


def started(stack: ExitStack, scheme: Any, workers: int, method: str) -> list[Other]:
    """Receivers that are ready; the sender's end is connected."""
    found = [
        stack.enter_context(other(receive, scheme, index, method=method))
        for index in range(workers)
    ]
    scheme.connect()
    assert [one.hear() for one in found] == ["ready"] * workers
    return found


def starts(*methods: str) -> Any:
    """Each scheme with each way to start its receivers that it can be used with."""
    pairs = [
        pytest.param(kind, method, id=f"{name}-{method}")
        for kind, name in zip(BOTH.args[1], BOTH.kwargs["ids"], strict=True)
        for method in methods
        # Receivers of the one with connections are the same however they start.
        if method == "forkserver" or kind in OF_SHARED_MEMORY
    ]
    return pytest.mark.parametrize(("kind", "method"), pairs)


@FORKS
@starts(*METHODS)
def test_weights_come_to_processes_of_ones_own(kind, method):
    learner = Whole(1, "first")
    scheme = kind()
    scheme.init_on_sender(model=learner, num_workers=2)
    with ExitStack() as stack:
        receivers = started(stack, scheme, 2, method)
        assert [one.ask(0) for one in receivers] == [({0}, None, False)] * 2

        scheme.send()
        assert [one.ask(None) for one in receivers] == [({1}, "first", True)] * 2
        scheme.wait_async(PATIENCE)

        learner.part.become(2).said = "second"
        scheme.send(worker_ids=1)
        assert receivers[0].ask(0) == ({1}, "first", False)
        assert receivers[1].ask(None) == ({2}, "second", True)

        scheme.send({0: Whole(3, "own"), 1: Whole(4, "other")})
        assert receivers[0].ask(PATIENCE) == ({3}, "own", True)
        assert receivers[1].ask(PATIENCE) == ({4}, "other", True)

        # One that waits is woken.
        for one in receivers:
            one.tell(None)
        scheme.send_async(Whole(5, "last"))
        assert [one.hear() for one in receivers] == [({5}, "last", True)] * 2
        scheme.wait_async(PATIENCE)


@FORKS
@starts("fork", "forkserver")
def test_the_end_of_a_receiver_is_noticed(kind, method):
    scheme = kind()
    scheme.init_on_sender(model=Whole(1), num_workers=2)
    with ExitStack() as stack:
        receivers = started(stack, scheme, 2, method)
        scheme.send()
        assert receivers[0].ask(None)[0] == {1}
        receivers[1].kill()
        scheme.wait_async(worker_ids=0)
        with pytest.raises(
            ConnectionError, match="receiver 1 ended before it received the weights"
        ):
            scheme.wait_async()
        # Others get theirs.
        scheme.send(Whole(2))
        assert receivers[0].ask(None)[0] == {2}
        scheme.wait_async(PATIENCE, worker_ids=0)


@BOTH
def test_who_takes_no_weights_is_waited_for_as_long_as_one_likes(kind):
    scheme = kind()
    scheme.init_on_sender(model=Whole(1), num_workers=2)
    with ExitStack() as stack:
        receivers = started(stack, scheme, 2, "forkserver")
        scheme.send()
        assert receivers[0].ask(None)[0] == {1}
        with pytest.raises(TimeoutError, match=r"receiver 1 did not receive the weights within"):
            scheme.wait_async(0.01)
        waited: list[Any] = []
        thread = threading.Thread(target=lambda: waited.append(scheme.wait_async()))
        thread.start()
        assert receivers[1].ask(None)[0] == {1}
        thread.join(PATIENCE)
        assert waited == [None]


@BOTH
def test_the_end_of_the_sender_is_noticed(kind):
    with other(send, kind, parent=True) as sender:
        assert sender.ask(1) == {1}
        assert sender.ask(2) == {2}
        sender.kill()
        # It is the receiver who tells that.
        assert sender.hear() == "the sender of weights has ended"


@BOTH
def test_a_sender_that_shuts_down_has_ended(kind):
    scheme = kind()
    scheme.init_on_sender(model=Whole(1))
    with ExitStack() as stack:
        (receiver,) = started(stack, scheme, 1, "forkserver")
        scheme.send()
        scheme.shutdown()
        # What was sent is not lost.
        assert receiver.ask(None)[0] == {1}
        assert receiver.ask(None) == (ConnectionError, "the sender of weights has ended")


@BOTH
def test_weights_that_were_sent_before_the_receiver_began_are_there(kind):
    scheme = kind()
    scheme.init_on_sender(model=Whole(1))
    with ExitStack() as stack:
        receiver = stack.enter_context(other(receive, scheme, 0))
        scheme.connect(weights=Whole(7, "early"))
        assert receiver.hear() == "ready"
        assert receiver.ask(0) == ({7}, "early", True)


def count(connection: Any, scheme: Any, last: int) -> None:
    """Receives until the last number; says whether one was torn, or came after a greater one."""
    model = Uniform(0, sizes=(10_000, 3, 500))
    scheme.init_on_receiver(model=model, worker_idx=0)
    scheme.connect()
    connection.send("ready")
    wrong, before = [], {0.0}
    while before != {last}:
        found = numbers(scheme.receive())
        if found != model.numbers or len(found) > 1 or found <= before:
            wrong.append((found, before))
        before = found
    connection.send(wrong)


@BOTH
def test_weights_are_whole_and_in_order_while_they_are_sent_all_the_time(kind):
    last = 2_000
    learner = Uniform(0, sizes=(10_000, 3, 500))
    scheme = kind()
    scheme.init_on_sender(model=learner)
    with other(count, scheme, last) as receiver:
        scheme.connect()
        assert receiver.hear() == "ready"
        for number in range(1, last + 1):
            learner.become(number)
            scheme.send()
        scheme.wait_async()
        assert receiver.hear() == []


def refused(connection: Any, scheme: Any) -> None:
    """A receiver that can't be one."""
    try:
        scheme.init_on_receiver(model=Whole(0))
    except RuntimeError as error:
        connection.send(str(error))


@FORKS
def test_a_process_that_was_forked_can_not_join_a_sender_that_has_threads():
    scheme = DistributedWeightSyncScheme()
    scheme.init_on_sender(model=Whole(1))
    with other(refused, scheme, method="fork") as receiver:
        assert "get_context('spawn')" in receiver.hear()
    scheme.shutdown()


def test_a_receiver_that_never_comes_holds_nobody_up():
    scheme = DistributedWeightSyncScheme()
    scheme.init_on_sender(model=Whole(1))
    scheme.connect()
    scheme.send()
    with pytest.raises(TimeoutError, match="receiver 0 did not receive the weights"):
        scheme.wait_async(0.01)
    scheme.shutdown()


def test_a_scheme_that_needs_a_collector_says_so():
    with pytest.raises(RuntimeError, match="RPCWeightSyncScheme needs a collector"):
        RPCWeightSyncScheme().init_on_sender(model=Whole(1))
