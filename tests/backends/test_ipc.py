"""Messages between two processes of one machine.

That they come whole and in order, and how they end, is tested with the backend for processes.
"""

import os
import subprocess
import sys
import threading

import pytest
from backend_parts import held_files

from trawl.backends.ipc import Closed, IpcConnection, connection_pair


@pytest.fixture
def wires():
    one, end = connection_pair()
    other = IpcConnection(end)
    yield one, other
    one.close()
    other.close()


@pytest.mark.parametrize("send", ["send", "post"])
@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("count", [0, 1, 250, 251, 600])
def test_descriptors_come_with_a_message(wires, send, size, count):
    one, other = wires
    before = held_files()
    read, write = os.pipe()
    getattr(one, send)(bytes(size), [read] * (count - 1) + [write] * (count > 0))
    getattr(one, send)("next")
    content, fds = other.receive()
    assert (len(content), len(fds)) == (size, count)
    # None of them is left to programs that are started.
    assert not any(os.get_inheritable(fd) for fd in fds)
    if fds:
        os.write(fds[-1], b"!")
        assert os.read(read, 1) == b"!"
    for fd in [*fds, read, write]:
        os.close(fd)
    assert other.receive() == ("next", [])
    assert held_files() <= before  # others may be closed by whoever had them


def test_nothing_there(wires):
    with pytest.raises(BlockingIOError):
        wires[0].receive(wait=False)


@pytest.mark.parametrize("wait", [True, False])
def test_the_end_comes_after_what_was_sent(wires, wait):
    one, other = wires
    # The other side never reads this, and that is told to this side first.
    other.send("unread")
    one.send("first")
    one.send(bytes(100_000))
    one.close()
    assert other.receive(wait) == ("first", [])
    assert other.receive(wait) == (bytes(100_000), [])
    for _ in range(2):
        with pytest.raises(Closed):
            other.receive(wait)


@pytest.mark.parametrize("send", ["send", "post"])
def test_nobody_is_there(wires, send):
    one, other = wires
    other.close()
    with pytest.raises(Closed):
        getattr(one, send)("content")
    one.close()
    with pytest.raises(Closed):
        getattr(one, send)("content")


def test_posting_does_not_wait(wires):
    one, other = wires
    before, got = held_files(), []

    def receive():
        content, fds = other.receive(wait=False)
        got.append(content)
        assert len(fds) == (content % 7 == 0)
        for fd in fds:
            os.close(fd)

    for i in range(2999):
        one.post(i, [0] if i % 7 == 0 else [])
    assert one.full
    assert not one.flush()
    # There is room for one again, which is not the last one's.
    receive()
    one.post(2999)
    while len(got) < 3000:
        one.flush()
        receive()
    assert got == list(range(3000))
    assert not one.full
    assert held_files() <= before  # others may be closed by whoever had them


def test_what_is_kept_is_let_go_of(wires):
    one, other = wires
    before = held_files()
    for _ in range(2000):
        one.post("x" * 1000, [0])
    assert held_files() > before
    one.close()
    other.close()
    assert held_files() <= before


class Unreadable:
    def __reduce__(self):
        return int, ("x",)


def test_what_can_not_be_sent_or_read_leaves_nothing(wires):
    one, other = wires
    before = held_files()
    with pytest.raises(TypeError, match="pickle"):
        one.post((bytes(100_000), threading.Lock()), [0])
    one.send(Unreadable(), [0, 1])
    one.send("next")
    with pytest.raises(ValueError, match="invalid literal"):
        other.receive()
    assert other.receive() == ("next", [])
    assert held_files() <= before


def test_lost_descriptors_are_an_error():
    code = """
import os, resource, socket
from trawl.backends.ipc import IpcConnection, connection_pair
one, end = connection_pair()
other = IpcConnection(end)
one.send("x", [0] * 20)
free = os.dup(0)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 5, free + 5))
try:
    other.receive()
except OSError as error:
    assert "too many open files" in str(error)
    assert os.dup(0) == free
    print("told")
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "told\n"


def test_a_signal_of_a_broken_pipe_ends_nothing():
    code = """
import signal
from trawl.backends.ipc import Closed, connection_pair
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
one, end = connection_pair()
end.close()
try:
    one.send("x")
except Closed:
    print("closed")
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "closed\n"
