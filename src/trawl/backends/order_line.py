"""A connection by which a worker's main thread is told what to do, with no other thread between.

What comes by a process group wakes a thread of the group, which wakes the one that asked for it,
which wakes the one that works. Any of them may be put on a processor on which another worker has
just begun, and waits there until the system looks again, for a third of a small batch's time. Who
reads from a socket by itself is woken once, on a processor that is free.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

import numpy as np

from trawl.backends.network import ask_now_and_then, listening
from trawl.backends.remote_packing import Packed

# What it is, bytes of the pickle, how many buffers there are; then the buffers' sizes.
_HEAD = struct.Struct("!BQI")
# Pieces of memory that the system takes at a time.
_MOST = 1000
_KEY = 16
# Seconds in which who comes is to say that it is who was waited for.
_GREETING = 5.0


@dataclass(frozen=True)
class Meeting:
    """Where a worker finds its orders.

    Attributes:
        host: address of the driver.
        port: port there.
        key: what it says to be let in.
        timeout: seconds that it may take to get there.
        link_timeout: seconds for which the driver may be out of reach; None: for ever.
    """

    host: str
    port: int
    key: bytes
    timeout: float
    link_timeout: float | None

    def connect(self) -> Orders:
        """Connects a worker to its driver.

        Raises:
            OSError: if that is out of reach.
        """
        end = socket.create_connection((self.host, self.port), self.timeout)
        end.sendall(self.key)
        end.settimeout(None)
        if self.link_timeout is not None:
            # The driver need not ask: it hears of the end of one that is out of reach.
            ask_now_and_then(end, self.link_timeout)
        return Orders(end)


class Orders:
    """A worker's end.

    Args:
        end: the connection; this object closes it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._rung, self._bell = os.pipe()
        self._poll = select.poll()
        for fd in (end.fileno(), self._rung):
            self._poll.register(fd, select.POLLIN)

    def ring(self) -> None:
        """Ends the wait for messages, now and ever after; any thread may do it.

        A signal does not do that for sure: it may come just before the thread begins to wait.
        """
        os.write(self._bell, b"!")

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
        """
        if self._rung in [fd for fd, _ in self._poll.poll()]:
            raise EOFError("nothing more is to be read")
        verb, nbytes, count = _HEAD.unpack(self._take(_HEAD.size))
        sizes = struct.unpack(f"!{count}Q", self._take(8 * count))
        return Packed(verb, bytes(self._take(nbytes)), [self._take(size) for size in sizes])

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
        host: address of this machine at which the worker finds it.
        timeout: seconds that the worker may take to get there.
        link_timeout: seconds after which it ends if this machine is out of its reach, or None.

    Attributes:
        meeting: where it finds it.
    """

    def __init__(self, host: str, timeout: float, link_timeout: float | None = None) -> None:
        self._listener = listening(host, 0)
        port, key = self._listener.getsockname()[1], os.urandom(_KEY)
        self.meeting = Meeting(host, port, key, timeout, link_timeout)
        self._lock = threading.Lock()
        self._end: socket.socket | None = None
        self._waiting: list[memoryview] = []
        self._pushing = self._closed = False

    def meet(self) -> None:
        """Waits for the worker, and sends what it was told before.

        Raises:
            OSError: if it does not come in time.
        """
        deadline = time.monotonic() + self.meeting.timeout
        with self._listener:
            while (end := self._admit(deadline)) is None:
                pass
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._end = end
            if self._closed:
                end.close()
            else:
                self._go_on()

    def _admit(self, deadline: float) -> socket.socket | None:
        """Who comes next; None for a stranger."""
        self._listener.settimeout(max(0.0, deadline - time.monotonic()))
        end, _ = self._listener.accept()
        end.settimeout(max(0.0, min(_GREETING, deadline - time.monotonic())))
        with contextlib.suppress(OSError):
            if hmac.compare_digest(end.recv(_KEY, socket.MSG_WAITALL), self.meeting.key):
                end.settimeout(None)
                return end
        end.close()
        return None

    def send(self, packed: Packed) -> None:
        """Sends a message, after those before; in vain to a worker that is gone."""
        sizes = [len(view) for view in packed.buffers]
        head = _HEAD.pack(packed.verb, len(packed.body), len(sizes))
        head += struct.pack(f"!{len(sizes)}Q", *sizes) + packed.body
        with self._lock:
            if not self._closed:
                self._waiting += map(memoryview, (head, *packed.buffers))
                self._go_on()

    def close(self) -> None:
        """Lets go of the worker."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            for end in (self._listener, self._end):
                # A thread that waits hears of it.
                if end is not None:
                    self._hang_up(end)
            self._listener.close()
            if self._end is not None and not self._pushing:
                self._end.close()

    @staticmethod
    def _hang_up(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    def _go_on(self) -> None:
        """Sends what waits, as far as there is room for it now."""
        if self._end is None or self._pushing:
            return
        try:
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
            with self._lock:
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
