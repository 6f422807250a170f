"""Connections over which a driver controls its workers.

A worker has up to three connections. Over the first, it receives *requests*, which the worker's
main loop reads itself. If a process group carried messages, each message would wake three threads
in turn: a thread of the group, the thread that waits for the message, and the thread that works.
The operating system may place any of these threads on a processor that another worker has just
begun to use. The thread then waits there for a third of the time that a small batch takes. In
contrast, a thread that reads from a socket itself wakes up only once, on a free processor.

Over the second connection, the worker sends its *answers*. The driver sends nothing over it: a
worker that dies would lose messages that are under way if it had left anything unread.

Over the third connection, the worker receives *signals* while it works, such as a signal to stop.
This connection also detects that the machine at the other end is out of reach. When a link is cut,
neither end is notified: data sent over the link is lost, and a process that only waits for an
answer waits forever. Therefore the kernels at both ends probe each other regularly (TCP
*keepalive*, RFC 9293, section 3.8.4), and close the connection if no answer has come for long
enough. The programs at both ends take no part in the probing. Therefore the link does not count as
cut when an environment lets no other thread run for minutes, or when a request takes minutes to
send.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from trawl.extras.clusters.launching.authentication import AuthenticationError, Session, connect
from trawl.extras.clusters.network.frames import Frame, seal, unseal
from trawl.extras.clusters.network.listener import Listener
from trawl.extras.clusters.network.sockets import is_readable, keep_alive, received_bytes

# Head of a message: its verb, the size of the sealed pickle in bytes, and the number of buffers.
# The sizes of the buffers follow.
_HEAD = struct.Struct("!BQI")
# Maximum number of buffers in one call of `sendmsg`, just below Linux's own limit of 1024.
_MOST = 1000
# Maximum size of a part of a message in bytes, which is more than the memory of any machine.
_LARGEST = 1 << 48

Lost = Callable[[str | None], None]


REQUESTS, SIGNALS, ANSWERS = "requests for {}", "signals for {}", "answers of {}"
LEAST_SECONDS = 2.0


@dataclass(frozen=True)
class Rendezvous:
    """Address at which a worker connects to its driver.

    Attributes:
        host: address of the driver.
        port: port of the driver.
        name: name of the worker.
        key: the key that the worker shares with the driver.
        timeout: seconds that connecting may take.
    """

    host: str
    port: int
    name: str
    key: bytes = field(repr=False)
    timeout: float

    def connect(self, kind: str = REQUESTS) -> WorkerConnection:
        """Connects a worker to its driver.

        Args:
            kind: kind of the connection: ``REQUESTS``, ``SIGNALS`` or ``ANSWERS``.

        Raises:
            OSError: if the driver is out of reach, or does not expect this worker.
            AuthenticationError: if the other end is not the driver.
        """
        name = kind.format(self.name)
        return WorkerConnection(*connect(self.host, self.port, name, self.key, self.timeout))


class WorkerConnection:
    """Worker's end of a connection to its driver.

    Args:
        end: the connected socket; this object closes it.
        session: the session that authenticates its messages.
    """

    def __init__(self, end: socket.socket, session: Session) -> None:
        self._end = end
        self._session = session
        self._rung, self._bell = os.pipe()
        self._poll = select.poll()
        for fd in (end.fileno(), self._rung):
            self._poll.register(fd, select.POLLIN)

    def ring(self) -> None:
        """Ends the current wait for messages and every later one. Any thread may call this method.

        A signal alone is not reliable, because it may arrive just before the thread begins to wait.
        """
        os.write(self._bell, b"!")

    def keep_alive(self, seconds: float, strictly: bool = False) -> None:
        """Makes the kernel close the connection if the driver is out of reach for ``seconds``.

        Args:
            seconds: seconds without an answer after which the kernel closes the connection.
            strictly: see :func:`~trawl.extras.clusters.network.sockets.keep_alive`.
        """
        keep_alive(self._end, seconds, strictly)

    def fileno(self) -> int:
        """Returns the descriptor to poll for messages."""
        return self._end.fileno()

    @property
    def waiting(self) -> bool:
        """True if there is something to read. The end of the connection also counts."""
        return bool(self._poll.poll(0))

    def next(self) -> Frame:
        """Waits for the next message and returns it.

        Raises:
            EOFError: if the driver is gone, is out of reach or closed the connection, or if
                :meth:`ring` was called.
            AuthenticationError: if the message did not come from the driver.
        """
        if self._rung in [fd for fd, _ in self._poll.poll()]:
            raise EOFError("there is nothing more to read")
        return _received(self._end, self._session)

    def send(self, frame: Frame) -> None:
        """Sends a message, and returns once the caller may change its memory.

        Raises:
            RuntimeError: if the driver is gone.
        """
        try:
            _send_all(self._end, _in_parts(frame, self._session))
        except OSError:
            raise RuntimeError("the driver is gone") from None

    def hang_up(self) -> None:
        """Ends the current :meth:`send` and every later one. Any thread may call this method."""
        _hang_up(self._end)

    def close(self) -> None:
        """Closes the connection."""
        self._end.close()
        os.close(self._rung)
        os.close(self._bell)


class ControlConnection:
    """Driver's end of a connection to a worker.

    Sending never waits: if the socket has no room, a thread sends the rest. A copy of this object
    in a forked process sends nothing.

    Args:
        listener: the listener that the worker connects to.
        kind: kind of the connection: ``REQUESTS``, ``SIGNALS`` or ``ANSWERS``.
        name: name of the worker.
        key: the key that the worker shares with this process.
        timeout: seconds that the worker may take to connect.

    Attributes:
        rendezvous: the address at which the worker connects.
    """

    def __init__(
        self, listener: Listener, kind: str, name: str, key: bytes, timeout: float
    ) -> None:
        self.rendezvous = Rendezvous(listener.host, listener.port, name, key, timeout)
        self._listener = listener
        self._name = kind.format(name)
        self._changed = threading.Condition()
        self._end: socket.socket | None = None
        self._session: Session | None = None
        # Messages that were sent before the worker connected, and bytes for which the socket had no
        # room.
        self._early: list[Frame] = []
        self._waiting: list[memoryview] = []
        self._pushing = self._closed = False
        self._owner = os.getpid()
        # Seconds that the worker may be out of reach, and a function to call after that time.
        self._patience: float | None = None
        self._lost: Lost | None = None
        listener.expect(self._name, key, self._admit)

    def watch(self, seconds: float, lost: Lost) -> None:
        """Begins to report when the worker is out of reach for too long.

        This method must be called before the worker connects. The end of the worker's process alone
        is not reported.

        Args:
            seconds: seconds that the worker may be out of reach.
            lost: function that the listener's thread calls with the reason when the worker was out
                of reach for longer. It is called with None if the worker's machine no longer knows
                the connection.
        """
        self._patience, self._lost = seconds, lost

    def wait_connected(self) -> None:
        """Waits until the worker has connected.

        Raises:
            OSError: if the worker does not connect in time, or if this end is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._end or self._closed, self.rendezvous.timeout)
            if self._end is None:
                raise TimeoutError("the worker did not connect, or does not have the right key")

    def _admit(self, end: socket.socket, session: Session) -> None:
        """Takes over the worker's connection, and sends the messages that were waiting for it."""
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            if self._closed:
                end.close()
                return
            self._end, self._session = end, session
            if self._patience is not None:
                keep_alive(end, self._patience, strictly=True)
                self._listener.watch(end, self._on_readable)
            early, self._early = self._early, []
            self._changed.notify_all()
            # On an error, `_send` closes the connection, which ends the worker. The listener's
            # thread must go on, because it also serves other workers.
            with contextlib.suppress(Exception):
                for frame in early:
                    self._send(frame)

    def receive(self) -> Frame:
        """Waits for the next message of the connected worker, and returns it.

        Only one thread may receive messages.

        Raises:
            EOFError: if the worker is gone, or :meth:`hang_up` was called.
            AuthenticationError: if the message did not come from the worker.
        """
        assert self._end is not None
        assert self._session is not None
        return _received(self._end, self._session)

    def received(self) -> tuple[int, bool]:
        """Returns the number of bytes that have come so far, and True if some were not read yet."""
        with self._changed:
            if self._closed or self._end is None:
                return 0, False
            return received_bytes(self._end), is_readable(self._end)

    def hang_up(self) -> None:
        """Ends a wait for a message of the worker, and every later one.

        What has come before is received first.
        """
        with self._changed:
            if self._end is not None and self._owner == os.getpid():
                _hang_up(self._end)

    def send(self, frame: Frame) -> None:
        """Sends a message, after all earlier ones. If the worker is gone, the message is lost."""
        with self._changed:
            if self._closed or self._owner != os.getpid():
                return
            if self._end is None:
                self._early.append(frame)
            else:
                self._send(frame)

    def close(self) -> None:
        """Closes the connection to the worker."""
        if self._owner != os.getpid():
            return
        self._listener.forget(self._name)
        with self._changed:
            self._closed, self._lost = True, None
            self._early.clear()
            self._waiting.clear()
            if self._end is not None:
                # This ends the wait of a thread that is sending.
                _hang_up(self._end)
                if not self._pushing:
                    self._close_end(self._end)
            self._changed.notify_all()

    def _close_end(self, end: socket.socket) -> None:
        # The listener closes a connection that it watches.
        if self._patience is None:
            end.close()

    def _on_readable(self) -> bool:
        """Handles the end of a watched connection; returns True if the connection goes on."""
        assert self._end is not None
        why = None
        try:
            # The worker never sends anything over this connection, so a read can only report the
            # end of the connection.
            self._end.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            pass
        except OSError:
            why = f"was out of reach for {self._patience:g} s (link_timeout)"
        else:
            return False
        if (lost := self._lost) is not None:
            lost(why)
        return False

    def _send(self, frame: Frame) -> None:
        """Sends as much of a message as the socket has room for now; a thread sends the rest."""
        assert self._end is not None
        assert self._session is not None
        try:
            self._waiting += _in_parts(frame, self._session)
            if self._pushing:
                return
            self._waiting = _sent(self._end, self._waiting, socket.MSG_DONTWAIT)
            if self._waiting:
                thread = threading.Thread(target=self._push, args=(self._end,), daemon=True)
                self._pushing = True
                thread.start()
        except BaseException:
            # It is unknown which part was sent, and nothing may be sent twice, so the worker is
            # given up.
            self._pushing, self._closed = False, True
            self._waiting.clear()
            _hang_up(self._end)
            raise

    def _push(self, end: socket.socket) -> None:
        """Sends the waiting bytes, as soon as there is room for them."""
        while True:
            with self._changed:
                parts, self._waiting = self._waiting, []
                self._pushing = bool(parts)
                if not parts:
                    if self._closed:
                        self._close_end(end)
                    return
            _sent(end, parts, 0)


def _in_parts(frame: Frame, session: Session) -> list[memoryview]:
    """Seals a message, and returns the pieces of memory to send."""
    sealed = seal(frame, session)
    sizes = [len(view) for view in sealed.buffers]
    head = _HEAD.pack(sealed.verb, len(sealed.body), len(sizes))
    head += struct.pack(f"!{len(sizes)}Q", *sizes) + sealed.body
    return [memoryview(part) for part in (head, *sealed.buffers)]


def _sent(end: socket.socket, parts: list[memoryview], flags: int) -> list[memoryview]:
    """Sends pieces of memory; returns the pieces that were not sent."""
    left = deque(parts)
    try:
        _send_all(end, left, flags)
    except BlockingIOError:
        return list(left)
    except OSError:
        # The worker is gone, which is reported by other means.
        return []
    return []


def _send_all(end: socket.socket, parts: Iterable[memoryview], flags: int = 0) -> None:
    """Sends pieces of memory; removes what was sent from a deque of pieces.

    Raises:
        OSError: if the other end is gone, or has no room for more and must not be waited for.
    """
    left = parts if isinstance(parts, deque) else deque(parts)
    while left:
        count = end.sendmsg(list(islice(left, _MOST)), [], flags | socket.MSG_NOSIGNAL)
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]


def _received(end: socket.socket, session: Session) -> Frame:
    """Waits for the next message and returns it.

    Raises:
        EOFError: if the other end is gone.
        AuthenticationError: if the message did not come from the other end.
    """
    verb, nbytes, count = _HEAD.unpack(_read(end, _HEAD.size))
    rest = _read(end, 8 * count + nbytes)
    sizes = struct.unpack_from(f"!{count}Q", rest)
    body, buffers = bytes(rest[8 * count :]), [_read(end, size) for size in sizes]
    return unseal(Frame(verb, body, buffers), session)


def _read(end: socket.socket, size: int) -> memoryview:
    if size > _LARGEST:
        # The tag can be checked only after memory has been allocated.
        raise AuthenticationError("the received bytes are no message of the other end")
    taken = np.empty(size, dtype=np.uint8).data
    left = taken
    while left:
        try:
            count = end.recv_into(left, flags=socket.MSG_WAITALL)
        except OSError:
            count = 0
        if not count:
            raise EOFError("the other end is gone")
        left = left[count:]
    return taken


def _hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
