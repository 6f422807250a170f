"""Connections over which a driver tells its workers what to do.

Each worker has two. Over the first it receives *requests*, which the thread that works reads when
it has time. No other thread is between: a message of a process group wakes a thread of the group,
which wakes the thread that waits for the message, which wakes the thread that works. The scheduler
may put any of them on a processor on which another worker has just begun. The thread then waits
there, for a third of the time that a small batch takes. A thread that reads from a socket itself
wakes up once, on a free processor.

Over the second connection it receives *signals*, such as to stop, while it works. This connection
also detects that the machine at the other end is out of reach. A cut link gives no sign: data sent
over it is lost, and a process that only waits for an answer waits forever. Therefore the kernels at
both ends probe each other now and then (TCP *keepalive*, RFC 9293, 3.8.4), and close the connection
when no answer came for long enough. The programs at both ends take no part in this. So an
environment that lets no other thread run for minutes is not mistaken for a cut link, nor is a
request that takes minutes to send.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from trawl.backends.authentication import Session, connect
from trawl.backends.frames import Frame, seal, unseal
from trawl.backends.listener import Listener
from trawl.backends.network import keep_alive

# Head of a message: its verb, bytes of the sealed pickle, number of buffers. Then come the buffers'
# sizes.
_HEAD = struct.Struct("!BQI")
# Most pieces of memory in one call of `sendmsg`, which the kernel limits.
_MOST = 1000

Lost = Callable[[str | None], None]


REQUESTS, SIGNALS = "requests for {}", "signals for {}"
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
            kind: kind of the connection: ``REQUESTS`` or ``SIGNALS``.

        Raises:
            OSError: if the driver is out of reach, or does not expect this worker.
            AuthenticationError: if the other end is not the driver.
        """
        name = kind.format(self.name)
        return WorkerConnection(*connect(self.host, self.port, name, self.key, self.timeout))


class WorkerConnection:
    """Worker's end of a connection to its driver.

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

    def keep_alive(self, seconds: float, strictly: bool = False) -> None:
        """Ends the connection when the driver is out of reach for ``seconds``.

        Args:
            seconds: the limit.
            strictly: as :func:`~trawl.backends.network.keep_alive` takes it.
        """
        keep_alive(self._end, seconds, strictly)

    def fileno(self) -> int:
        """Returns the descriptor to poll for messages."""
        return self._end.fileno()

    @property
    def waiting(self) -> bool:
        """True if there is something to read, if only the end of the connection."""
        return bool(self._poll.poll(0))

    def next(self) -> Frame:
        """Waits for the next message and returns it.

        Raises:
            EOFError: if the driver is gone, is out of reach or closed the connection; or after
                :meth:`ring`.
            AuthenticationError: if the driver did not send the message.
        """
        if self._rung in [fd for fd, _ in self._poll.poll()]:
            raise EOFError("nothing more is to be read")
        verb, nbytes, count = _HEAD.unpack(self._read(_HEAD.size))
        sizes = struct.unpack(f"!{count}Q", self._read(8 * count))
        body, buffers = bytes(self._read(nbytes)), [self._read(size) for size in sizes]
        return unseal(Frame(verb, body, buffers), self._session)

    def close(self) -> None:
        """Closes the connection."""
        self._end.close()
        os.close(self._rung)
        os.close(self._bell)

    def _read(self, size: int) -> memoryview:
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


class ControlConnection:
    """Driver's end of a connection to a worker.

    Sending never waits: if the socket has no room, a thread sends the rest. A copy of this object
    in a forked process sends nothing.

    Args:
        listener: the listener that the worker connects to.
        kind: kind of the connection: ``REQUESTS`` or ``SIGNALS``.
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
        # Messages from before the worker connected, and bytes that the socket had no room for.
        self._early: list[Frame] = []
        self._waiting: list[memoryview] = []
        self._pushing = self._closed = False
        self._owner = os.getpid()
        # Seconds that the worker may be out of reach, and a function to call if it was.
        self._patience: float | None = None
        self._lost: Lost | None = None
        listener.expect(self._name, key, self._admit)

    def watch(self, seconds: float, lost: Lost) -> None:
        """Calls ``lost`` if the worker is out of reach. Call it before the worker connects.

        The argument is the reason, or None if the worker's machine no longer knows the connection.
        The end of the worker's process alone is not reported.

        Args:
            seconds: seconds that the worker may be out of reach.
            lost: the function, which is called from the listener's thread.
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
        """Takes over the worker's connection, and sends the messages that wait for it."""
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
            # On an error `_send` closes the connection, which ends the worker. The listener's
            # thread must go on, as it serves other workers, too.
            with contextlib.suppress(Exception):
                for frame in early:
                    self._send(frame)

    def send(self, frame: Frame) -> None:
        """Sends a message, after all earlier ones. It is lost if the worker is gone."""
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
                self._hang_up(self._end)
                if not self._pushing:
                    self._close_end(self._end)
            self._changed.notify_all()

    def _close_end(self, end: socket.socket) -> None:
        # The listener closes a connection that it watches.
        if self._patience is None:
            end.close()

    def _on_readable(self) -> bool:
        """Handles the end of a watched connection; returns True if it has not ended yet."""
        assert self._end is not None
        why = None
        try:
            # Nothing is ever sent to this end: only the end of the connection can be read.
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

    @staticmethod
    def _hang_up(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    def _send(self, frame: Frame) -> None:
        """Sends as much of a message as there is room for now; a thread sends the rest."""
        assert self._end is not None
        assert self._session is not None
        try:
            sealed = seal(frame, self._session)
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
                        self._close_end(end)
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
