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
import os
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from trawl.backends.network import ask_now_and_then, listening

LEAST_SECONDS = 2.0
_LONGEST_NAME = 1024
_END = b"\n"

Lost = Callable[[str | None], None]


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

    def connect(self, name: str) -> Lifeline:
        """Connects a worker to its driver.

        Args:
            name: the worker's name there.

        Raises:
            OSError: if that is out of reach.
        """
        end = socket.create_connection((self.host, self.port), self.seconds)
        _ask(end, self.seconds)
        end.sendall(name.encode() + _END)
        end.settimeout(None)
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
    """The driver's ends of its workers' lifelines, and a thread that waits for what they tell.

    Args:
        host: address of this machine at which workers find it.
        seconds: for which a worker's machine may be out of reach.
    """

    def __init__(self, host: str, seconds: float) -> None:
        self._seconds = seconds
        self._lost: dict[str, Lost] = {}
        self._listener = listening(host, 0)
        self._listener.setblocking(False)
        self.line = Line(host, self._listener.getsockname()[1], seconds)
        self._read, self._write = os.pipe()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def watch(self, name: str, lost: Lost) -> None:
        """Calls ``lost``, from a thread, when the worker of that name is out of reach.

        It is called with the reason, or with None if its machine doesn't know of the connection.
        That a worker's process ends is not told.
        """
        self._lost[name] = lost

    def forget(self, name: str) -> None:
        """Ends that."""
        self._lost.pop(name, None)

    def close(self) -> None:
        """Lets go of all workers."""
        os.write(self._write, b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self._write)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj == self._read:
                        self._end(selector)
                        return
                    if key.fileobj is self._listener:
                        self._admit(selector)
                    elif isinstance(key.fileobj, socket.socket):
                        self._hear(selector, key.fileobj, key.data)

    def _admit(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            end, _ = self._listener.accept()
            end.setblocking(False)
            _ask(end, self._seconds)
            selector.register(end, selectors.EVENT_READ, bytearray())

    def _hear(self, selector: selectors.BaseSelector, end: socket.socket, name: bytearray) -> None:
        """Takes in a worker's name, or the end of its line."""
        try:
            said = end.recv(_LONGEST_NAME)
        except BlockingIOError:
            return
        except ConnectionResetError:
            self._tell(name, None)
        except OSError:
            self._tell(name, f"was out of reach for {self._seconds:g} s (link_timeout)")
        else:
            name += said
            if said and len(name) <= _LONGEST_NAME:
                return
        selector.unregister(end)
        end.close()

    def _tell(self, name: bytearray, why: str | None) -> None:
        lost = self._lost.get(name.removesuffix(_END).decode(errors="replace"))
        if lost is not None:
            lost(why)

    def _end(self, selector: selectors.BaseSelector) -> None:
        for key in list(selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        os.close(self._read)
