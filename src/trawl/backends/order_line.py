"""A connection by which a worker's main thread is told what to do, with no other thread between.

What comes by a process group wakes a thread of the group, which wakes the one that asked for it,
which wakes the one that works. Any of them may be put on a processor on which another worker has
just begun, and waits there until the system looks again, for a third of a small batch's time. Who
reads from a socket by itself is woken once, on a processor that is free.
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

# What it is, bytes of the sealed pickle, how many buffers there are; then the buffers' sizes.
_HEAD = struct.Struct("!BQI")
# Pieces of memory that the system takes at a time.
_MOST = 1000


@dataclass(frozen=True)
class Meeting:
    """Where a worker finds its orders.

    Attributes:
        host: address of the driver.
        port: port there.
        name: the worker's name there.
        key: the key that it shares with the driver.
        timeout: seconds that it may take to get there.
    """

    host: str
    port: int
    name: str
    key: bytes = field(repr=False)
    timeout: float

    def connect(self) -> Orders:
        """Connects a worker to its driver.

        Raises:
            OSError: if that is out of reach, or does not wait for this worker.
            AuthenticationError: if the other end is not the driver.
        """
        name = _connection(self.name)
        return Orders(*connect(self.host, self.port, name, self.key, self.timeout))


def _connection(name: str) -> str:
    """The name that a worker's orders have as a connection."""
    return f"orders for {name}"


class Orders:
    """A worker's end.

    Args:
        end: the connection; this object closes it.
        session: what authenticates its messages.
    """

    def __init__(self, end: socket.socket, session: Session) -> None:
        self._end = end
        self._session = session
        self._rung, self._bell = os.pipe()
        self._poll = select.poll()
        for fd in (end.fileno(), self._rung):
            self._poll.register(fd, select.POLLIN)

    def ring(self) -> None:
        """Ends the wait for messages, now and ever after; any thread may do it.

        A signal does not do that for sure: it may come just before the thread begins to wait.
        """
        os.write(self._bell, b"!")

    def ask_now_and_then(self, seconds: float | None) -> None:
        """Ends the connection when the driver was out of reach for so long; None: never.

        The driver need not ask: it hears of the end of a worker that is out of reach.
        """
        if seconds is not None:
            ask_now_and_then(self._end, seconds)

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._end.fileno()

    @property
    def waiting(self) -> bool:
        """Whether there is something to read, if only the end."""
        return bool(self._poll.poll(0))

    def next(self) -> Packed:
        """The next message; waits for it.

        Raises:
            EOFError: if the driver is gone or out of reach, or has let go; or after :meth:`ring`.
            AuthenticationError: if the driver did not send what came.
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
    """The driver's end. Who sends does not wait: what there is no room for, a thread sends.

    Args:
        listener: where the worker connects.
        name: the worker's name there.
        key: the key that it shares with this process.
        timeout: seconds that the worker may take to get there.

    Attributes:
        meeting: where it finds it.
    """

    def __init__(self, listener: Listener, name: str, key: bytes, timeout: float) -> None:
        self.meeting = Meeting(listener.host, listener.port, name, key, timeout)
        self._listener = listener
        self._changed = threading.Condition()
        self._end: socket.socket | None = None
        self._session: Session | None = None
        # What is sent before there is a connection, and what there was no room for.
        self._early: list[Packed] = []
        self._waiting: list[memoryview] = []
        self._pushing = self._closed = False
        listener.expect(_connection(name), key, self._admit)

    def meet(self) -> None:
        """Waits for the worker.

        Raises:
            OSError: if it does not come in time, or if this is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._end or self._closed, self.meeting.timeout)
            if self._end is None:
                raise TimeoutError("the worker did not connect, or does not have the right key")

    def _admit(self, end: socket.socket, session: Session) -> None:
        """Takes the worker's connection, and sends what it was told before."""
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            if self._closed:
                end.close()
                return
            self._end, self._session = end, session
            early, self._early = self._early, []
            self._changed.notify_all()
            # If that fails the line is closed, by which the worker ends. The thread is others' too.
            with contextlib.suppress(Exception):
                for packed in early:
                    self._send(packed)

    def send(self, packed: Packed) -> None:
        """Sends a message, after those before; in vain to a worker that is gone."""
        with self._changed:
            if self._closed:
                return
            if self._end is None:
                self._early.append(packed)
            else:
                self._send(packed)

    def close(self) -> None:
        """Lets go of the worker."""
        self._listener.forget(_connection(self.meeting.name))
        with self._changed:
            self._closed = True
            self._early.clear()
            self._waiting.clear()
            if self._end is not None:
                # A thread that sends hears of it.
                self._hang_up(self._end)
                if not self._pushing:
                    self._end.close()
            self._changed.notify_all()

    @staticmethod
    def _hang_up(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    def _send(self, packed: Packed) -> None:
        """Sends a message, as far as there is room for it now."""
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
            # Nobody knows what was sent, and it is not to be sent twice: that worker is lost.
            self._pushing, self._closed = False, True
            self._waiting.clear()
            self._hang_up(self._end)
            raise

    def _push(self, end: socket.socket) -> None:
        """Sends what waits, as there comes to be room for it."""
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
    """Sends pieces of memory; gives what is left of them."""
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
        # Nobody takes it any more: that the worker is gone is told in other ways.
        return []
    return []
