"""The way of weights to one receiver, who notices the end of the sender, and is noticed to end."""

from __future__ import annotations

import multiprocessing
import os
import queue
import select
import signal
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from weight_parts import PATIENCE, Uniform, Whole, answering, as_sent, numbers, other

from trawl.weight_update import MPTransport, SharedMemTransport, WeightStrategy
from trawl.weight_update.store import WeightStore


def receive_as_told(connection: Any, transport: Any) -> None:
    """Receives whenever it is asked to, with a time-out; tells the numbers."""
    if isinstance(transport, SharedMemTransport):
        transport.connect_receiver()

    def receive(timeout: float | None) -> Any:
        found = transport.receive_weights(timeout)
        return None if found is None else numbers(found)

    connection.send("ready")
    answering(connection, receive)


def send_as_told(connection: Any, transport: Any = None) -> None:
    """Makes a transport and gives it away; sends whenever it is asked to."""
    if transport is None:
        transport = SharedMemTransport()
        connection.send(transport)
        connection.recv()
        transport.connect_sender()
    model = Uniform()

    def send(number: Any) -> str:
        if number == "the end":
            os.kill(os.getpid(), signal.SIGKILL)
        transport.send_weights(model.become(number))
        return "sent"

    answering(connection, send)


# --- shared memory


def test_shared_memory_brings_the_newest_weights():
    transport = SharedMemTransport()
    with other(receive_as_told, transport) as receiver:
        transport.connect_sender()
        assert receiver.hear() == "ready"
        assert receiver.ask(0) is None
        for number in (1, 2, 3):
            transport.send_weights(Uniform(number))
        assert receiver.ask(None) == {3}
        assert receiver.ask(0) is None
        transport.send_weights_async(Uniform(4))
        assert receiver.ask(None) == {4}


def test_shared_memory_wakes_who_waits():
    transport = SharedMemTransport()
    with other(receive_as_told, transport) as receiver:
        transport.connect_sender()
        assert receiver.hear() == "ready"
        receiver.tell(None)
        transport.send_weights(Uniform(1))
        assert receiver.hear() == {1}


def test_shared_memory_rings_for_what_was_sent_and_for_what_was_taken():
    transport = SharedMemTransport()
    receiver = as_sent(transport)
    transport.connect_sender()
    receiver.connect_receiver()
    for number in range(3):
        assert not rung(receiver._theirs)
        transport.send_weights(Uniform(number))
        assert rung(receiver._theirs)
        assert not rung(transport._ours)
        receiver.receive_weights()
        assert rung(transport._ours)
        receiver.wait(0)
        transport.wait_ack(0)
        transport._ours.wait(0)
        receiver._theirs.wait(0)


def rung(bell: Any) -> bool:
    """Whether who waits for it would be woken."""
    return bool(select.select([bell._end], [], [], 0)[0])


def test_shared_memory_waits_no_longer_than_it_was_told():
    transport = SharedMemTransport()
    with other(receive_as_told, transport) as receiver:
        transport.connect_sender()
        assert receiver.hear() == "ready"
        assert receiver.ask(0.01) is None
        transport.send_weights(Uniform(1))
        assert receiver.ask(PATIENCE) == {1}


def test_shared_memory_tells_when_weights_were_taken():
    transport = SharedMemTransport()
    with other(receive_as_told, transport) as receiver:
        transport.connect_sender()
        transport.wait_ack(0)  # nothing was sent
        assert receiver.hear() == "ready"
        for number in range(3):
            transport.send_weights(Uniform(number))
            with pytest.raises(
                TimeoutError, match="receiver 0 did not receive the weights within 0 s"
            ):
                transport.wait_ack(0)
            with pytest.raises(TimeoutError, match=r"did not receive the weights within 0.01 s"):
                transport.wait_ack(0.01)
            receiver.tell(0)
            transport.wait_ack(PATIENCE)
            transport.wait_ack()
            assert receiver.hear() == {number}


def test_shared_memory_notices_a_receiver_that_is_killed():
    transport = SharedMemTransport()
    with other(receive_as_told, transport) as receiver:
        transport.connect_sender()
        assert receiver.hear() == "ready"
        transport.send_weights(Uniform(1))
        waiting, told = threading.Event(), []

        def wait() -> None:
            waiting.set()
            try:
                transport.wait_ack()
            except ConnectionError as error:
                told.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        receiver.kill()
        thread.join(PATIENCE)
        assert told == ["receiver 0 ended before it received the weights"]
        with pytest.raises(ConnectionError, match="receiver 0 ended before"):
            transport.wait_ack()
    # To send is no mistake: somebody may take its place.
    transport.send_weights(Uniform(2))


def test_shared_memory_knows_that_who_ended_had_taken_the_weights():
    transport = SharedMemTransport()
    with other(receive_as_told, transport) as receiver:
        transport.connect_sender()
        assert receiver.hear() == "ready"
        transport.send_weights(Uniform(1))
        assert receiver.ask(None) == {1}
        receiver.kill()
        transport.wait_ack()


def test_shared_memory_notices_a_sender_that_is_killed():
    with other(send_as_told) as sender:
        transport = sender.hear()
        transport.connect_receiver()
        sender.tell("go on")
        assert sender.ask(1) == "sent"
        assert numbers(transport.receive_weights()) == {1}
        assert sender.ask(2) == "sent"
        sender.kill()
        # What was sent is taken first.
        assert numbers(transport.receive_weights()) == {2}
        for timeout in (None, PATIENCE):
            with pytest.raises(ConnectionError, match="the sender of weights has ended"):
                transport.receive_weights(timeout)


def test_shared_memory_notices_a_sender_that_is_killed_while_it_waits():
    with other(send_as_told) as sender:
        transport = sender.hear()
        transport.connect_receiver()
        sender.tell("go on")
        assert sender.ask(1) == "sent"
        transport.receive_weights()
        # What it is told at last ends it, while this waits for weights.
        sender.tell("the end")
        with pytest.raises(ConnectionError, match="the sender of weights has ended"):
            transport.receive_weights()


def test_shared_memory_puts_weights_into_a_model_or_tensors():
    transport = SharedMemTransport()
    receiver = as_sent(transport)
    model, tensors = Whole(0, "this"), WeightStrategy().extract_weights(Whole(0))
    transport.send_weights(Whole(1, "that"))
    found = receiver.receive_weights(model=model, strategy=WeightStrategy("state_dict"))
    assert model.part.numbers == {1}
    assert model.part.said == "that"
    assert set(found) == {*dict(model.named_parameters()), "part.count", "part._extra_state"}
    transport.send_weights(Whole(2))
    found = receiver.receive_weights(weights=tensors)
    assert isinstance(found, TensorDict)
    assert numbers(tensors) == {2}


def test_what_shared_memory_gives_is_the_receivers_own():
    transport = SharedMemTransport()
    receiver = as_sent(transport)
    transport.send_weights(Uniform(1))
    found = receiver.receive_weights()
    for number in range(2, 9):
        transport.send_weights(Uniform(number))
    assert numbers(found) == {1}
    found["count"].fill_(0)
    assert numbers(receiver.receive_weights()) == {8}


def test_shared_memory_refuses_weights_of_another_form_than_the_first():
    transport = SharedMemTransport()
    receiver = as_sent(transport)
    transport.send_weights(Uniform(1))
    with pytest.raises(KeyError, match="don't fit the policy of the receiver: missing"):
        transport.send_weights(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"'parts.0' has shape \(2,\)"):
        transport.send_weights(Uniform(2, sizes=(2, 70, 1)))
    with pytest.raises(TypeError, match="weights must be a module"):
        transport.send_weights(3)
    assert numbers(receiver.receive_weights(0)) == {1}


def test_each_end_of_shared_memory_does_its_own():
    transport = SharedMemTransport()
    receiver = as_sent(transport)
    for call in (lambda: receiver.send_weights(Uniform()), receiver.wait_ack):
        with pytest.raises(RuntimeError, match="this end of the transport only receives"):
            call()
    transport.connect_sender()
    with pytest.raises(RuntimeError, match="this end of the transport only sends"):
        transport.receive_weights()
    with pytest.raises(RuntimeError, match="can't be sent to another process once it is connected"):
        as_sent(transport)


def test_transports_may_share_a_board():
    store = WeightStore(2)
    transports = [SharedMemTransport(store, index) for index in range(2)]
    receivers = [as_sent(transport) for transport in transports]
    transports[0].send_weights(Uniform(1))
    assert numbers(receivers[0].receive_weights(0)) == {1}
    assert receivers[1].receive_weights(0) is None
    transports[1].send_weights(Uniform(2))
    assert numbers(receivers[1].receive_weights(0)) == {2}


def test_a_transport_may_be_closed_again():
    transport = SharedMemTransport()
    for _ in range(2):
        transport.close()


# --- queues


def test_a_queue_between_threads_brings_weights_one_by_one():
    transport = MPTransport(queue.Queue())
    for number in (1, 2):
        transport.send_weights(Uniform(number))
    assert numbers(transport.receive_weights()) == {1}
    assert numbers(transport.receive_weights()) == {2}
    assert transport.receive_weights(0) is None


def test_a_queue_takes_a_copy_of_the_weights():
    transport, model = MPTransport(queue.Queue()), Uniform(1)
    transport.send_weights(model)
    model.become(2)
    assert numbers(transport.receive_weights()) == {1}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_queue_of_answers_tells_when_weights_were_taken(asynchronous):
    transport = MPTransport(queue.Queue(), queue.Queue(), timeout=PATIENCE)
    model, found = Uniform(0), []

    def receive() -> None:
        found.append(numbers(transport.receive_weights(model=model)))

    thread = threading.Thread(target=receive)
    thread.start()
    if asynchronous:
        transport.send_weights_async(Uniform(1))
        transport.wait_ack()
    else:
        transport.send_weights(Uniform(1))
    assert model.numbers == {1}
    thread.join(PATIENCE)
    assert found == [{1}]


def test_a_queue_waits_no_longer_than_it_was_told():
    transport = MPTransport(queue.Queue(), queue.Queue(), timeout=0.01)
    assert transport.receive_weights() is None
    with pytest.raises(TimeoutError, match=r"the weights were not received within 0.01 s"):
        transport.send_weights(Uniform())
    with pytest.raises(TimeoutError, match=r"the weights were not received within 0.02 s"):
        transport.wait_ack(0.02)
    # Without a queue of answers there is nothing to wait for.
    MPTransport(queue.Queue(), timeout=0).send_weights(Uniform())


def test_a_queue_gives_weights_in_the_form_that_is_asked_for():
    transport = MPTransport(queue.Queue())
    for _ in range(2):
        transport.send_weights(Whole(1, "that"))
    model, tensors = Whole(0), WeightStrategy("state_dict").extract_weights(Uniform(0))
    found = transport.receive_weights(model=model, strategy=WeightStrategy("state_dict"))
    assert type(found) is dict
    assert (model.part.numbers, model.part.said) == ({1}, "that")
    assert isinstance(transport.receive_weights(), TensorDict)
    transport.send_weights({"count": torch.ones(2, dtype=tensors["count"].dtype)})
    transport.receive_weights(weights=tensors)
    assert numbers({"count": tensors["count"]}) == {1}


def test_queues_bring_weights_to_another_process():
    context = multiprocessing.get_context("forkserver")
    transport = MPTransport(context.Queue(), context.Queue(), timeout=PATIENCE)
    with other(receive_as_told, transport) as receiver:
        assert receiver.hear() == "ready"
        for number in (1, 2):
            receiver.tell(PATIENCE)
            transport.send_weights(Uniform(number))
            assert receiver.hear() == {number}
        assert receiver.ask(0) is None
    for one in (transport.weight_queue, transport.ack_queue):
        one.close()
        one.join_thread()


def test_queues_bring_weights_from_another_process():
    context = multiprocessing.get_context("forkserver")
    transport = MPTransport(context.Queue(), timeout=PATIENCE)
    model = Uniform(0)
    with other(send_as_told, transport) as sender:
        for number in (1, 2):
            assert sender.ask(number) == "sent"
            assert numbers(transport.receive_weights(model=model)) == {number}
            assert model.numbers == {number}
    transport.weight_queue.close()
