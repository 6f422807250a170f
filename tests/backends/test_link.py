"""Connections by a process group of two."""

import os
import threading

import pytest
import torch

from trawl.backends.frames import MESSAGE, pack
from trawl.backends.launching.authentication import AuthenticationError
from trawl.backends.link import Address, hosted_store
from trawl.backends.network import LOOPBACK

FRAME = 2048


@pytest.fixture
def linked():
    """Both ends of a connection."""
    _store, port = hosted_store(LOOPBACK, 0, 100.0)
    address = Address(LOOPBACK, port, 100.0, "test", os.urandom(32))
    found = {}

    def link():
        found[1] = address.link(1)

    thread = threading.Thread(target=link)
    thread.start()
    found[0] = address.link(0)
    thread.join()
    return found[0], found[1]


def test_a_message_comes(linked):
    sender, receiver = linked
    for content in ("small", list(range(100_000)), b"again"):
        # A large message is sent as it is received.
        thread = threading.Thread(target=sender.send, args=(pack(MESSAGE, content),))
        thread.start()
        assert receiver.receive().content() == content
        thread.join()


@pytest.mark.parametrize(
    "garbage",
    [bytes(FRAME), b"\xff" * FRAME, bytes(range(256)) * 8, os.urandom(FRAME)],
    ids=["zeros", "ones", "bytes", "random"],
)
def test_garbage_is_refused(linked, garbage):
    """Whatever sizes it says there are."""
    sender, receiver = linked
    frame = torch.frombuffer(bytearray(garbage), dtype=torch.uint8)
    work = sender._group.send([frame], 1, 0)
    with pytest.raises(AuthenticationError):
        receiver.receive()
    work.wait()
