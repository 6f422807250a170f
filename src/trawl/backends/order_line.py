"""Connection over which a worker's main thread reads its orders, without another thread between.

A message of a process group wakes a thread of the group, which wakes the thread that waits for the
message, which wakes the thread that works. The scheduler may put any of them on a processor on
which another worker has just begun. The thread then waits there, for a third of the time that a
small batch takes. A thread that reads from a socket itself wakes up once, on a free processor.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from trawl.backends.authentication import Session, connect
from trawl.backends.listener import Listener
from trawl.backends.network import ask_now_and_then
from trawl.backends.remote_packing import Packed, seal, unseal

# Head of a message: its verb, bytes of the sealed pickle, number of buffers. Then come the buffers'
# sizes.
_HEAD = struct.Struct("!BQI")
# Most pieces of memory in one call of `sendmsg`, which the kernel limits.
_MOST = 1000


@dataclass(frozen=True)
class Meeting:
    """Address at which a worker connects to receive its orders.

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

    def connect(self) -> Orders:
        """Connects a worker to its driver.

        Raises:
            OSError: if the driver is out of reach, or does not expect this worker.
            AuthenticationError: if the other end is not the driver.
        """
        name = _connection(self.name)
        return Orders(*connect(self.host, self.port, name, self.key, self.timeout))


def _connection(name: str) -> str:
    """Returns the connection name of a worker's orders."""
    return f"orders for {name}"


class Orders:
    """Worker's end of the connection for orders.

    Args:
        end: the connection; this object closes it.
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
        """Ends this and every later wait for messages. Any thread may call it.

        A signal alone is not reliable: it may come just before the thread begins to wait.
        """
        os.write(self._bell, b"!")

    def ask_now_and_then(self, seconds: float | None) -> None:
        """Ends the connection when the driver is out of reach for ``seconds``; None: never.

        The driver's end needs no keepalive: the driver learns by other means that a worker is out
        of reach.
        """
        if seconds is not None:
            ask_now_and_then(self._end, seconds)

    def fileno(self) -> int:
        """Returns the descriptor to poll for messages."""
        return self._end.fileno()

    @property
    def waiting(self) -> bool:
        """True if there is something to read, if only the end of the connection."""
        return bool(self._poll.poll(0))

    def next(self) -> Packed:
        """Waits for the next message and returns it.

        Raises:
            EOFError: if the driver is gone, is out of reach or closed the connection; or after
                :meth:`ring`.
            AuthenticationError: if the driver did not send the message.
        """
        if self._rung in [fd for fd, _ in self._poll.poll()]:
            raise EOFError("nothing more is to be read")
        verb, nbytes, count = _HEAD.unpack(self._take(_HEAD.size))
        sizes = struct.unpack(f"!{count}Q", self._take(8 * count))
        body, buffers = bytes(self._take(nbytes)), [self._take(size) for size in sizes]
        return unseal(Packed(verb, body, buffers), self._session)

    def close(self) -> None:
        """Closes the connection."""
        self._end.close()
        os.close(self._rung)
        os.close(self._bell)

    def _take(self, size: int) -> memoryview:
        taken = np.empty(size, dtype=np.uint8).data
        left = taken
        while left:
            try:
                count = self._end.recv_into(left)
            except OSError:
                count = 0
            if not count:
                raise EOFError("the driver is gone")
            left = left[count:]
        return taken


class OrderLine:
    """Driver's end of the connection for a worker's orders.

    Sending never waits: if the socket has no room, a thread sends the rest.

    Args:
        listener: the listener that the worker connects to.
        name: name of the worker.
        key: the key that the worker shares with this process.
        timeout: seconds that the worker may take to connect.

    Attributes:
        meeting: the address at which the worker connects.
    """

    def __init__(self, listener: Listener, name: str, key: bytes, timeout: float) -> None:
        self.meeting = Meeting(listener.host, listener.port, name, key, timeout)
        self._listener = listener
        self._changed = threading.Condition()
        self._end: socket.socket | None = None
        self._session: Session | None = None
        # Messages from before the worker connected, and bytes that the socket had no room for.
        self._early: list[Packed] = []
        self._waiting: list[memoryview] = []
        self._pushing = self._closed = False
        listener.expect(_connection(name), key, self._admit)

    def meet(self) -> None:
        """Waits until the worker has connected.

        Raises:
            OSError: if the worker does not connect in time, or if this end is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._end or self._closed, self.meeting.timeout)
            if self._end is None:
                raise TimeoutError("the worker did not connect, or does not have the right key")

    def _admit(self, end: socket.socket, session: Session) -> None:
        """Takes over the worker's connection, and sends the messages that wait for it."""
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            if self._closed:
                end.close()
                return
            self._end, self._session = end, session
            early, self._early = self._early, []
            self._changed.notify_all()
            # On an error `_send` closes the connection, which ends the worker. The listener's
            # thread must go on, as it serves other workers, too.
            with contextlib.suppress(Exception):
                for packed in early:
                    self._send(packed)

    def send(self, packed: Packed) -> None:
        """Sends a message, after all earlier ones. It is lost if the worker is gone."""
        with self._changed:
            if self._closed:
                return
            if self._end is None:
                self._early.append(packed)
            else:
                self._send(packed)

    def close(self) -> None:
        """Closes the connection to the worker."""
        self._listener.forget(_connection(self.meeting.name))
        with self._changed:
            self._closed = True
            self._early.clear()
            self._waiting.clear()
            if self._end is not None:
                # This ends the wait of a thread that is sending.
                self._hang_up(self._end)
                if not self._pushing:
                    self._end.close()
            self._changed.notify_all()

    @staticmethod
    def _hang_up(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    def _send(self, packed: Packed) -> None:
        """Sends as much of a message as there is room for now; a thread sends the rest."""
        assert self._end is not None
        assert self._session is not None
        try:
            sealed = seal(packed, self._session)
            sizes = [len(view) for view in sealed.buffers]
            head = _HEAD.pack(sealed.verb, len(sealed.body), len(sizes))
            head += struct.pack(f"!{len(sizes)}Q", *sizes) + sealed.body
            self._waiting += map(memoryview, (head, *sealed.buffers))
            if self._pushing:
                return
            self._waiting = _sent(self._end, self._waiting, socket.MSG_DONTWAIT)
            if self._waiting:
                thread = threading.Thread(target=self._push, args=(self._end,), daemon=True)
                self._pushing = True
                thread.start()
        except BaseException:
            # It is unknown what was sent, and nothing may be sent twice: the worker is given up.
            self._pushing, self._closed = False, True
            self._waiting.clear()
            self._hang_up(self._end)
            raise

    def _push(self, end: socket.socket) -> None:
        """Sends the waiting bytes, as soon as there is room for them."""
        while True:
            with self._changed:
                parts, self._waiting = self._waiting, []
                self._pushing = bool(parts)
                if not parts:
                    if self._closed:
                        end.close()
                    return
            _sent(end, parts, 0)


def _sent(end: socket.socket, parts: list[memoryview], flags: int) -> list[memoryview]:
    """Sends pieces of memory; returns those that are left."""
    left = deque(parts)
    try:
        while left:
            count = end.sendmsg(list(islice(left, _MOST)), [], flags | socket.MSG_NOSIGNAL)
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]
    except BlockingIOError:
        return list(left)
    except OSError:
        # The worker is gone, which is reported by other means.
        return []
    return []
