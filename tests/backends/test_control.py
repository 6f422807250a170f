"""Connections of workers over a network.

That messages come whole and in order, and that nobody waits for a reader, is tested with the
backend.
"""

import os
import struct
import threading
from contextlib import suppress

import numpy as np
import pytest
from backend_parts import descriptors

from trawl.extras.clusters.launching.authentication import AuthenticationError
from trawl.extras.clusters.network.control import REQUESTS, ControlConnection
from trawl.extras.clusters.network.frames import Frame
from trawl.extras.clusters.network.listener import Listener
from trawl.extras.clusters.network.sockets import LOOPBACK

LARGE = 20_000_000
KEY = os.urandom(32)


@pytest.fixture
def listener():
    listener = Listener(LOOPBACK)
    yield listener
    listener.close()


@pytest.fixture
def line(listener):
    line = ControlConnection(listener, REQUESTS, "worker", KEY, timeout=300.0)
    yield line
    line.close()
    join_pushing()


def join_pushing():
    """Waits for the threads that send: they close what they have."""
    for thread in threading.enumerate():
        if "_push" in thread.name:
            thread.join()


def met(line):
    orders = line.rendezvous.connect()
    line.wait_connected()
    return orders


def test_a_message_of_many_buffers(line):
    buffers = [memoryview(bytes([i % 256]) * (i % 3)) for i in range(3_000)]
    orders = met(line)
    line.send(Frame(1, b"", buffers))
    assert [bytes(one) for one in orders.next().buffers] == [bytes(one) for one in buffers]
    orders.close()


def test_threads_send_whole_messages(line):
    def send(verb):
        for size in (10, 300_000, 1_000_000) * 5:
            line.send(Frame(verb, bytes([verb]) * size))

    orders = met(line)
    threads = [threading.Thread(target=send, args=(verb,)) for verb in range(4)]
    for thread in threads:
        thread.start()
    found = [orders.next() for _ in range(4 * 15)]
    for thread in threads:
        thread.join()
    for verb in range(4):
        own = [one.body for one in found if one.verb == verb]
        assert own == [bytes([verb]) * size for size in (10, 300_000, 1_000_000)] * 5
    orders.close()


def test_the_end_comes_after_what_was_sent(line):
    orders = met(line)
    line.send(Frame(1, b"last"))
    line.close()
    assert orders.next().body == b"last"
    assert orders.waiting
    with pytest.raises(EOFError, match="other end is gone"):
        orders.next()
    orders.close()


def test_messages_come_both_ways(line):
    body, array = os.urandom(100), np.random.default_rng(0).integers(0, 256, LARGE, np.uint8)
    orders = met(line)
    thread = threading.Thread(target=orders.send, args=(Frame(4, body, [memoryview(array)]),))
    thread.start()
    line.send(Frame(5))
    found = line.receive()
    thread.join()
    assert (found.verb, found.body, orders.next().verb) == (4, body, 5)
    assert [bytes(one) for one in found.buffers] == [array.tobytes()]
    orders.close()
    with pytest.raises(EOFError):
        line.receive()


def test_who_hangs_up_neither_sends_nor_receives(line):
    orders = met(line)
    orders.hang_up()
    with pytest.raises(RuntimeError, match="driver is gone"):
        orders.send(Frame(1, bytes(LARGE)))
    with pytest.raises(EOFError):
        line.receive()
    orders.close()


@pytest.mark.parametrize("head", [(1, 1 << 62, 0), (1, 0, 1)])
def test_sizes_that_nothing_has_are_refused(line, head):
    """They would be allocated before the tag can be checked."""
    orders = met(line)
    sizes = struct.pack("!Q", 1 << 62) * head[2]
    os.write(orders.fileno(), struct.pack("!BQI", *head) + sizes)
    with pytest.raises(AuthenticationError):
        line.receive()
    orders.close()


def test_nobody_comes(listener):
    line = ControlConnection(listener, REQUESTS, "worker", KEY, timeout=0.01)
    with pytest.raises(TimeoutError):
        line.wait_connected()
    line.close()


def test_a_line_that_is_closed_is_waited_for_no_longer(line):
    failed = []

    def wait_connected():
        try:
            line.wait_connected()
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=wait_connected)
    thread.start()
    line.close()
    thread.join()
    assert failed


@pytest.mark.parametrize("size", [1, LARGE])
def test_what_is_sent_to_one_that_is_gone_is_lost(line, size):
    orders = met(line)
    orders.close()
    for _ in range(3):
        line.send(Frame(1, bytes(size)))


@pytest.mark.parametrize("meets", [False, True])
def test_nothing_stays_open(meets):
    before = descriptors()
    listener = Listener(LOOPBACK)
    line = ControlConnection(listener, REQUESTS, "worker", KEY, timeout=300.0)
    if meets:
        orders = met(line)
        # A thread is in the middle of it.
        line.send(Frame(1, bytes(LARGE)))
        line.close()
        # It ends though nobody reads.
        join_pushing()
        with suppress(EOFError):
            while orders.next():
                pass
        orders.close()
    line.close()
    line.send(Frame(2))
    listener.close()
    assert descriptors() <= before


def test_who_is_told_to_wait_no_longer_does_not(line):
    orders = met(line)
    orders.ring()
    assert orders.waiting
    with pytest.raises(EOFError):
        orders.next()
    orders.close()


def test_a_message_that_is_broken_off_ends_the_line(line, monkeypatch):
    orders = met(line)

    def interrupted(self):
        raise KeyboardInterrupt

    # What does not fit is to be sent by a thread.
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        line.send(Frame(1, bytes(LARGE)))
    line.send(Frame(2))
    with pytest.raises(EOFError):
        orders.next()
    orders.close()
