"""Channels of messages: the newest message wins, and is acknowledged by its number."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from weight_parts import PATIENCE, Uniform, as_sent, numbers

from trawl.weights.layout import ModuleWeights, Slot
from trawl.weights.messages import Inbox, Outbox, WeightMessage


def message(count: int, number: float | None, version: Any = None) -> WeightMessage:
    """A message with weights of one number; without weights if that is None."""
    if number is None:
        return WeightMessage(count, version)
    module = ModuleWeights(Uniform(number))
    buffer = np.zeros(module.layout.nbytes, dtype=np.uint8)
    module.writer()(Slot(module.layout, buffer), count)
    return WeightMessage(count, version, module.layout, buffer)


def received(inbox: Inbox) -> tuple[int, Any, set[float]]:
    """What an inbox has: the number of the message, its version, and the numbers in its weights."""
    update = inbox.receive(lambda update: None)
    return update.count, update.version, numbers(update.copy().tensors)


def test_the_newest_message_is_received_and_acknowledged():
    acknowledged: list[int] = []
    inbox = Inbox(acknowledge=acknowledged.append)
    assert not inbox.newer
    assert received(inbox) == (0, None, set())
    inbox.put(message(2, 2, "b"))
    inbox.put(message(1, 1, "a"))  # is late
    assert inbox.newer
    assert received(as_sent(inbox)) == received(inbox) == (2, "b", {2})
    inbox.put(message(1, 1))
    assert (inbox.newer, inbox.count, acknowledged) == (False, 2, [2])


@pytest.mark.parametrize("taken_first", [False, True])
def test_a_version_alone_keeps_the_weights_that_wait(taken_first):
    inbox = Inbox(message(1, 1, "a"))
    if taken_first:
        received(inbox)
    inbox.put(message(2, None, "b"))
    assert received(inbox) == (2, "b", set() if taken_first else {1})


def test_a_message_whose_use_fails_stays_new():
    inbox = Inbox(message(1, 1))
    with pytest.raises(ZeroDivisionError):
        inbox.receive(lambda update: 1 // 0)
    assert inbox.newer
    assert inbox.count == 0


def test_an_inbox_waits_for_a_message_or_the_end():
    inbox = Inbox()
    assert not inbox.wait(0)
    assert not inbox.wait(0.01)
    thread = threading.Thread(target=lambda: (inbox.put(message(1, 1)), inbox.end()))
    thread.start()
    assert inbox.wait(PATIENCE)
    thread.join()
    # What was sent before the end is not lost.
    assert inbox.wait(None)
    received(inbox)
    for timeout in (None, 0):
        with pytest.raises(ConnectionError, match="the sender of weights has ended"):
            inbox.wait(timeout)


def test_an_outbox_sends_the_newest_and_waits_for_its_number():
    outbox = Outbox(7)
    outbox.wait_ack(0)  # nothing was sent
    for count in (1, 3, 2):
        outbox.put(message(count, count))
    assert outbox.next().count == 3
    assert outbox.next(wait=False) is None
    outbox.acknowledge(2)
    with pytest.raises(TimeoutError, match="receiver 7 did not receive the weights within 0 s"):
        outbox.wait_ack(0)
    outbox.wait_ack(0, count=2)
    outbox.acknowledge(3)
    outbox.acknowledge(1)
    outbox.wait_ack(None)


def test_an_outbox_that_is_closed_sends_what_it_has_unless_its_receiver_is_lost():
    outbox = Outbox(7)
    outbox.put(message(1, 1))
    outbox.close()
    assert outbox.next().count == 1
    assert outbox.next() is None
    outbox.put(message(2, 2))
    threading.Thread(target=outbox.close, args=(True,)).start()
    with pytest.raises(ConnectionError, match="receiver 7 ended before it received the weights"):
        outbox.wait_ack(None)
    outbox.close()
    assert outbox.next() is None
