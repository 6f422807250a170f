"""Nothing is taken in that did not come from a process which knows the key."""

import contextlib
import hashlib
import os
import pickle
import resource
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from backend_parts import descriptors

from trawl.extras.clusters.launching.authentication import AuthenticationError, Session, connect
from trawl.extras.clusters.network import listener as listeners
from trawl.extras.clusters.network.control import REQUESTS, SIGNALS, ControlConnection
from trawl.extras.clusters.network.frames import Frame, pack, seal, unseal
from trawl.extras.clusters.network.listener import MOST_GUESTS, Listener
from trawl.extras.clusters.network.sockets import LOOPBACK

KEY, OTHER = os.urandom(32), os.urandom(32)
PATIENCE = 300.0


def sessions(key=KEY, other=KEY, purpose="test"):
    """Both ends of a connection."""
    nonces = os.urandom(32), os.urandom(32)
    return Session(key, "test", nonces, client=True), Session(other, purpose, nonces, client=False)


def test_messages_that_were_sent_are_taken():
    client, server = sessions()
    for number in range(3):
        server.check(client.tag(b"to", b"server", bytes(number)), b"to", b"server", bytes(number))
        client.check(server.tag(b"back"), b"back")


def replayed(client, server):
    tag = client.tag(b"content")
    server.check(tag, b"content")
    return tag, b"content"


def left_out(client, server):
    client.tag(b"content")
    return client.tag(b"content"), b"content"


ATTACKS = {
    "forged": lambda client, server: (os.urandom(32), b"content"),
    "short": lambda client, server: (client.tag(b"content")[:31], b"content"),
    "missing": lambda client, server: (b"", b"content"),
    "changed": lambda client, server: (client.tag(b"content"), b"CONTENT"),
    "reflected": lambda client, server: (server.tag(b"content"), b"content"),
    "of another connection": lambda client, server: (sessions()[0].tag(b"content"), b"content"),
    "replayed": replayed,
    "left out": left_out,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_what_the_other_end_did_not_send_is_refused(attack):
    client, server = sessions()
    with pytest.raises(AuthenticationError):
        server.check(*attack(client, server))


@pytest.mark.parametrize("differs", [{"other": OTHER}, {"purpose": "another"}])
def test_another_key_or_purpose_is_refused(differs):
    client, server = sessions(**differs)
    with pytest.raises(AuthenticationError):
        server.check(client.tag())


EXPLODED = []


def explode():
    EXPLODED.append(1)


class Bomb:
    """Something that does harm when it is unpickled."""

    def __reduce__(self):
        return explode, ()


@pytest.fixture
def bomb():
    data = pickle.dumps(Bomb())
    pickle.loads(data)
    assert EXPLODED == [1]
    EXPLODED.clear()
    yield data
    assert EXPLODED == []


def test_a_message_is_not_unpickled_before_it_is_authenticated(bomb):
    _, server = sessions()
    with pytest.raises(AuthenticationError):
        unseal(Frame(0, bytes(32) + bomb), server).content()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: Frame(m.verb + 1, m.body, m.buffers),
        lambda m: Frame(m.verb, m.body + b".", m.buffers),
        lambda m: Frame(m.verb, m.body, [memoryview(bytes(m.buffers[0])[1:])]),
        lambda m: Frame(m.verb, m.body, []),
    ],
)
def test_a_sealed_message_that_was_changed_is_refused(change):
    client, server = sessions()
    message = pack(2, bytearray(100_000))
    assert unseal(seal(message, client), server).content() == bytes(100_000)
    message = seal(pack(2, pickle.PickleBuffer(bytearray(100_000))), client)
    assert len(message.buffers) == 1
    with pytest.raises(AuthenticationError):
        unseal(change(message), server)


# --- over sockets


class Door:
    """A listener, and those that it admitted."""

    def __init__(self):
        self.listener = Listener(LOOPBACK)
        self.admitted = {}
        self.came = threading.Event()

    def expect(self, name, key=KEY):
        self.listener.expect(name, key, lambda end, session: self.admit(name, end, session))

    def admit(self, name, end, session):
        self.admitted[name] = end, session
        self.came.set()

    def connect(self, name, key=KEY, timeout=PATIENCE):
        return connect(self.listener.host, self.listener.port, name, key, timeout)

    def stranger(self):
        """A connection that says nothing."""
        return socket.create_connection((self.listener.host, self.listener.port), PATIENCE)


@pytest.fixture
def door():
    door = Door()
    yield door
    door.listener.close()
    for end, _ in door.admitted.values():
        end.close()


def test_a_worker_that_is_expected_is_admitted(door):
    door.expect("worker")
    end, session = door.connect("worker")
    assert door.came.wait(PATIENCE)
    with end:
        theirs, their_session = door.admitted["worker"]
        theirs.sendall(their_session.tag(b"order"))
        session.check(end.recv(32, socket.MSG_WAITALL), b"order")


def test_another_key_is_told_at_once_and_opens_nothing(door):
    door.expect("worker")
    with pytest.raises(AuthenticationError, match="have different keys: set TRAWL_KEY"):
        door.connect("worker", OTHER)
    assert not door.admitted
    # The worker itself may still come.
    door.connect("worker")[0].close()
    assert door.came.wait(PATIENCE)


def test_who_is_not_expected_is_told_at_once(door):
    door.expect("worker")
    door.expect("other")
    door.listener.forget("other")
    for name in ("nobody", "other"):
        with pytest.raises(
            ConnectionRefusedError, match=f"does not expect a connection named '{name}'"
        ):
            door.connect(name)
    door.connect("worker")[0].close()
    with pytest.raises(ConnectionRefusedError):
        door.connect("worker")


def test_a_greeting_that_was_overheard_admits_nobody(door):
    """Nor does the key of one connection open another."""
    door.expect("worker")
    heard = []
    relay = socket.create_server((LOOPBACK, 0))

    def pass_on():
        client, _ = relay.accept()
        server = door.stranger()
        with client, server:
            for source, sink, size in ((client, server, 64), (server, client, 33)) * 2:
                said = source.recv(size)
                heard.append(said)
                sink.sendall(said)

    thread = threading.Thread(target=pass_on)
    thread.start()
    connect(LOOPBACK, relay.getsockname()[1], "worker", KEY, PATIENCE)[0].close()
    thread.join()
    relay.close()
    assert door.came.wait(PATIENCE)
    assert [len(said) for said in heard] == [64, 33, 32, 32]
    door.expect("worker")
    with door.stranger() as again:
        again.sendall(heard[0])
        assert again.recv(33, socket.MSG_WAITALL)[:1] == b"+"
        again.sendall(heard[2])
        assert again.recv(32, socket.MSG_WAITALL) == bytes(32)
        assert again.recv(1) == b""


def test_a_client_takes_nobody_for_the_driver():
    """Whoever it comes to must know the key as well."""
    with socket.create_server((LOOPBACK, 0)) as fake:

        def answer():
            end, _ = fake.accept()
            with end:
                end.recv(64, socket.MSG_WAITALL)
                end.sendall(b"+" + bytes(32))
                # It sends the worker's own proof back to it.
                end.sendall(end.recv(32, socket.MSG_WAITALL))
                end.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(AuthenticationError):
            connect(LOOPBACK, fake.getsockname()[1], "worker", KEY, PATIENCE)
        thread.join()


def test_an_error_with_one_connection_does_not_end_the_others(door, capfd):
    def fail(end, session=None):
        raise ValueError(f"trouble {'at first' if session else 'later'}")

    def watch(end, session):
        door.listener.watch(end, lambda: fail(end, end.recv(1) and None))
        door.came.set()

    door.listener.expect("first", KEY, fail)
    door.listener.expect("watched", KEY, watch)
    first, watched = door.connect("first")[0], door.connect("watched")[0]
    assert door.came.wait(PATIENCE)
    with first, watched:
        watched.sendall(b"x")
        assert watched.recv(1) == b""
    door.came.clear()
    door.expect("worker")
    door.connect("worker")[0].close()
    assert door.came.wait(PATIENCE)
    said = capfd.readouterr().err
    assert "trouble at first" in said
    assert "trouble later" in said


def test_strangers_neither_delay_a_worker_nor_take_many_descriptors(door, monkeypatch):
    """Whether they say nothing, garbage, or half of a greeting; the first of many are dropped."""
    monkeypatch.setattr(listeners, "GREETING_SECONDS", 1000.0)
    before, strangers = descriptors(), []
    try:
        for count in (36, 5 * MOST_GUESTS):
            door.came.clear()
            strangers += [door.stranger() for _ in range(count)]
            for number, stranger in enumerate(strangers[-count:]):
                # One that was dropped already can't be told anything.
                with contextlib.suppress(OSError):
                    stranger.sendall([b"", os.urandom(20), os.urandom(64)][number % 3])
            door.expect(f"worker {count}")
            door.connect(f"worker {count}")[0].close()
            assert door.came.wait(PATIENCE)
        # The ends of the two workers, which have gone, may be open still.
        assert descriptors() - before <= len(strangers) + MOST_GUESTS + 2
        # The first of those that said nothing were dropped.
        assert all(one.recv(1) == b"" for one in strangers[36 : 4 * MOST_GUESTS : 3])
    finally:
        for one in strangers:
            one.close()


def test_strangers_are_dropped_soon(door, monkeypatch):
    monkeypatch.setattr(listeners, "GREETING_SECONDS", 0.05)
    with door.stranger() as silent, door.stranger() as slow:
        slow.sendall(b"?")
        assert silent.recv(1) == b""
        assert slow.recv(1) == b""


def test_a_crowd_that_never_ends_does_not_keep_a_worker_out(door):
    """Each connection that is opened drops another, which may be the worker's: it tries again."""
    over = threading.Event()

    def crowd():
        ends = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                ends.append(door.stranger())
            if len(ends) > 2 * MOST_GUESTS:
                ends.pop(0).close()
        for one in ends:
            one.close()

    threads = [threading.Thread(target=crowd) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(5):
            door.expect(f"worker {number}")
            door.connect(f"worker {number}")[0].close()
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_process_without_descriptors_accepts_again_later(door):
    """Connections that wait are accepted once there are descriptors; the thread lives on."""
    door.expect("worker")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as stranger:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limits[1])
        )
        try:
            stranger.connect((door.listener.host, door.listener.port))
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        door.connect("worker")[0].close()
        assert door.came.wait(PATIENCE)


@pytest.mark.parametrize("closes", ["listener", "peer"])
def test_nothing_stays_open(closes):
    before = descriptors()
    door = Door()
    door.expect("worker")
    end, _ = door.connect("worker")
    stranger = door.stranger()
    assert door.came.wait(PATIENCE)
    theirs, _ = door.admitted["worker"]
    door.listener.watch(theirs, lambda: bool(theirs.recv(1)))
    for one in (end, stranger):
        if closes == "peer":
            one.close()
    door.listener.close()
    door.listener.close()
    for one in (end, stranger):
        one.close()
    assert descriptors() <= before


# --- what hangs on it


RESET = """
import socket, struct, sys
end = socket.create_connection(({host!r}, {port}))
end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
end.sendall({said!r})
end.recv({size})
end.close()
"""


def test_a_forged_name_and_a_reset_kill_no_worker(door):
    """A stranger who knows the names of workers can't have their connections end."""
    lost = []
    control = ControlConnection(door.listener, SIGNALS, "worker", KEY, PATIENCE)
    control.watch(30.0, lost.append)
    hello = hashlib.sha256(b"signals for worker").digest() + bytes(32)
    for said, size in ((b"worker\n", 0), (hello, 33)):
        code = RESET.format(host=door.listener.host, port=door.listener.port, said=said, size=size)
        subprocess.run([sys.executable, "-c", code], check=True)
    # What the stranger did was noticed before this: it came before.
    held = control.rendezvous.connect(SIGNALS)
    with pytest.raises(ConnectionRefusedError):
        control.rendezvous.connect(SIGNALS)
    assert lost == []
    # A reset by the worker's own machine is told.
    end = held._end
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
    deadline = time.monotonic() + PATIENCE
    while not lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lost == [None]
    held.close()
    control.close()


def test_a_request_that_is_forged_is_not_read(door, bomb):
    line = ControlConnection(door.listener, REQUESTS, "worker", KEY, PATIENCE)
    orders = line.rendezvous.connect()
    line.wait_connected()
    # Somebody on the way puts it in.
    line._end.sendall(b"\0" + (32 + len(bomb)).to_bytes(8, "big") + bytes(4 + 32) + bomb)
    with pytest.raises(AuthenticationError):
        orders.next().content()
    orders.close()
    line.close()
