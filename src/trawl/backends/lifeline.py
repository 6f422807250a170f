"""Connections that detect when the machine at the other end is out of reach.

A cut link gives no sign: data sent over it is lost, and a process that only waits for an answer
waits forever. Therefore each worker has one more connection to its driver, over which nothing is
sent. The kernels at both ends probe each other now and then (TCP *keepalive*, RFC 9293, 3.8.4), and
close the connection when no answer came for long enough. The programs at both ends take no part in
this. So an environment that lets no other thread run for minutes is not mistaken for a cut link,
nor is a message that takes minutes to send.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from trawl.backends.authentication import Session, connect
from trawl.backends.listener import Listener
from trawl.backends.network import ask_now_and_then

LEAST_SECONDS = 2.0

Lost = Callable[[str | None], None]


def _connection(name: str) -> str:
    """Returns the connection name of a worker's lifeline."""
    return f"lifeline of {name}"


@dataclass(frozen=True)
class Line:
    """Address of the driver's end of a worker's lifeline.

    Attributes:
        host: address of the driver.
        port: port of the driver.
        seconds: seconds that the other end may be out of reach; at least ``LEAST_SECONDS``.
    """

    host: str
    port: int
    seconds: float

    def connect(self, name: str, key: bytes) -> Lifeline:
        """Connects a worker to its driver.

        Args:
            name: name of the worker.
            key: the key that the worker shares with the driver.

        Raises:
            OSError: if the driver is out of reach.
            AuthenticationError: if the other end is not the driver.
        """
        end, _ = connect(self.host, self.port, _connection(name), key, self.seconds)
        _ask(end, self.seconds)
        return Lifeline(end)


class Lifeline:
    """Worker's end of a lifeline, open until the driver closes its end or the process ends.

    Args:
        end: the connection.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def watch(self, lost: Callable[[], None]) -> None:
        """Calls ``lost``, from a thread, when the driver is gone or out of reach."""
        threading.Thread(target=self._wait, args=(lost,), daemon=True).start()

    def _wait(self, lost: Callable[[], None]) -> None:
        with self._end, contextlib.suppress(OSError):
            self._end.recv(1)
        lost()


def _ask(end: socket.socket, seconds: float) -> None:
    """Turns on keepalive: without answers, the kernel closes the connection."""
    every = ask_now_and_then(end, seconds)
    # The kernel checks this limit at each probe only, and it overrides the number of probes.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        most = int(1000 * (seconds - every / 2))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most)


class Lifelines:
    """Driver's ends of its workers' lifelines.

    Args:
        listener: the listener that workers connect to; its thread watches the lifelines.
        seconds: seconds that a worker's machine may be out of reach.

    Attributes:
        line: the address that workers connect their lifelines to.
    """

    def __init__(self, listener: Listener, seconds: float) -> None:
        self._listener = listener
        self._lost: dict[str, Lost] = {}
        self.line = Line(listener.host, listener.port, seconds)

    def watch(self, name: str, key: bytes, lost: Lost) -> None:
        """Calls ``lost``, from the listener's thread, when a worker is out of reach.

        The argument is the reason, or None if the worker's machine no longer knows the connection.
        The end of the worker's process alone is not reported.

        Args:
            name: name of the worker.
            key: the key that the worker shares with this process.
            lost: the function to call.
        """
        self._lost[name] = lost
        self._listener.expect(_connection(name), key, partial(self._admit, name))

    def forget(self, name: str) -> None:
        """Stops watching the worker of that name."""
        self._lost.pop(name, None)
        self._listener.forget(_connection(name))

    # --- in the listener's thread

    def _admit(self, name: str, end: socket.socket, session: Session) -> None:
        end.setblocking(False)
        _ask(end, self.line.seconds)
        self._listener.watch(end, partial(self._hear, name, end))

    def _hear(self, name: str, end: socket.socket) -> bool:
        """Handles the end of a worker's lifeline; returns True if it has not ended yet."""
        try:
            # Nothing is ever sent: only the end of the connection can be read.
            end.recv(1)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            self._tell(name, None)
        except OSError:
            self._tell(name, f"was out of reach for {self.line.seconds:g} s (link_timeout)")
        return False

    def _tell(self, name: str, why: str | None) -> None:
        lost = self._lost.get(name)
        if lost is not None:
            lost(why)
