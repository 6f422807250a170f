"""Connection over which two processes wake each other."""

from __future__ import annotations

import contextlib
import select
import socket
from multiprocessing import reduction
from typing import Any


class PeerGone(ConnectionError):
    """Raised if the other side has ended."""


class Wakeup:
    """One end of a connection over which each side can wake the other side and notice its death."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Wakeup, Wakeup]:
        """Returns both ends of a new connection."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return _wakeup, (reduction.DupFd(self._end.fileno()),)

    def wake(self) -> None:
        """Wakes the other side, or does nothing if it has ended."""
        # If the socket is full, the other side has enough to wake it.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._end.send(b"!")

    def wait(self, timeout: float | None) -> None:
        """Waits until the other side wakes this one, but not longer than ``timeout`` seconds.

        Raises:
            PeerGone: if the other side has ended.
        """
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if not poll.poll(None if timeout is None else max(0.0, timeout) * 1000):
            return
        try:
            received = self._end.recv(1 << 12)
        except BlockingIOError:
            return
        except ConnectionResetError:
            received = b""
        if not received:
            raise PeerGone

    def close(self) -> None:
        """Closes this end."""
        self._end.close()

    def __del__(self) -> None:
        if hasattr(self, "_end"):
            self._end.close()


def _wakeup(descriptor: Any) -> Wakeup:
    return Wakeup(socket.socket(fileno=descriptor.detach()))
