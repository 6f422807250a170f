"""Connections that tell when the machine at the other end is out of reach.

A link that is cut says nothing: what is sent is lost, and who only waits for an answer waits for
ever. So each worker has one more connection to its driver, over which nothing is sent. The systems
at both ends ask each other now and then whether they are there (the *keepalive* of TCP, RFC 9293,
3.8.4), and close it when there was no answer for long enough. That takes no time of the program at
either end: an environment that lets no other thread run for minutes is not taken for a cut link,
nor is a message that takes minutes to be sent.
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
    """The name that a worker's lifeline has as a connection."""
    return f"lifeline of {name}"


@dataclass(frozen=True)
class Line:
    """Where a worker's lifeline leads to.

    Attributes:
        host: address of the driver.
        port: port there.
        seconds: for which the other end may be out of reach, at least ``LEAST_SECONDS``.
    """

    host: str
    port: int
    seconds: float

    def connect(self, name: str, key: bytes) -> Lifeline:
        """Connects a worker to its driver.

        Args:
            name: the worker's name there.
            key: the key that it shares with the driver.

        Raises:
            OSError: if that is out of reach.
            AuthenticationError: if the other end is not the driver.
        """
        end, _ = connect(self.host, self.port, _connection(name), key, self.seconds)
        _ask(end, self.seconds)
        return Lifeline(end)


class Lifeline:
    """A worker's end; it is held until the driver lets go, or the process ends.

    Args:
        end: the connection.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def watch(self, lost: Callable[[], None]) -> None:
        """Calls ``lost``, from a thread, when the driver is gone, or out of reach."""
        threading.Thread(target=self._wait, args=(lost,), daemon=True).start()

    def _wait(self, lost: Callable[[], None]) -> None:
        with self._end, contextlib.suppress(OSError):
            self._end.recv(1)
        lost()


def _ask(end: socket.socket, seconds: float) -> None:
    """Has the system ask the other end's, and close the connection without answers."""
    every = ask_now_and_then(end, seconds)
    # It is looked at with each question only, and counts before the number of these.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        most = int(1000 * (seconds - every / 2))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most)


class Lifelines:
    """The driver's ends of its workers' lifelines.

    Args:
        listener: where workers connect them, and whose thread waits for what they tell.
        seconds: for which a worker's machine may be out of reach.

    Attributes:
        line: where lifelines lead to.
    """

    def __init__(self, listener: Listener, seconds: float) -> None:
        self._listener = listener
        self._lost: dict[str, Lost] = {}
        self.line = Line(listener.host, listener.port, seconds)

    def watch(self, name: str, key: bytes, lost: Lost) -> None:
        """Calls ``lost``, from a thread, when the worker of that name is out of reach.

        It is called with the reason, or with None if its machine doesn't know of the connection.
        That a worker's process ends is not told.

        Args:
            name: the worker's name.
            key: the key that it shares with this process.
            lost: what is called.
        """
        self._lost[name] = lost
        self._listener.expect(_connection(name), key, partial(self._admit, name))

    def forget(self, name: str) -> None:
        """Ends that."""
        self._lost.pop(name, None)
        self._listener.forget(_connection(name))

    # --- in the listener's thread

    def _admit(self, name: str, end: socket.socket, session: Session) -> None:
        end.setblocking(False)
        _ask(end, self.line.seconds)
        self._listener.watch(end, partial(self._hear, name, end))

    def _hear(self, name: str, end: socket.socket) -> bool:
        """Takes in the end of a worker's line; tells whether there may be more to hear."""
        try:
            # Nothing is ever sent.
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
