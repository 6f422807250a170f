"""Port to which workers connect, and a thread that authenticates incoming connections."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator
from typing import Any

from trawl.extras.clusters.launching.authentication import (
    AuthenticationError,
    Expected,
    Session,
    greeting,
)
from trawl.extras.clusters.network.sockets import listening

# Maximum number of handshakes at a time, and seconds that each may take. Unknown clients must
# neither use up the descriptors of this process nor keep a worker waiting.
MOST_GUESTS = 64
GREETING_SECONDS = 5.0
# Pause in seconds before the next connection is accepted if this process has no descriptor left.
_FULL = 0.05


class _Guest:
    """Connection that is not authenticated yet."""

    def __init__(self, end: socket.socket, find: Callable[[bytes], Expected | None]) -> None:
        self.end = end
        self.deadline = time.monotonic() + GREETING_SECONDS
        self._steps: Generator[tuple[bytes, int], bytes, Any] = greeting(find)
        _, self._wanted = next(self._steps)
        self._received = b""

    def go_on(self) -> tuple[Expected, Session] | None:
        """Reads available bytes, and continues the handshake.

        Returns:
            The expected connection and its session, or None if the handshake has not ended.

        Raises:
            OSError: if the client fails the authentication or has hung up.
        """
        with contextlib.suppress(BlockingIOError):
            more = self.end.recv(self._wanted - len(self._received))
            if not more:
                raise ConnectionResetError
            self._received += more
        if len(self._received) < self._wanted:
            return None
        try:
            answer, self._wanted = self._steps.send(self._received)
        except AuthenticationError as error:
            self.end.send(*error.args)
            raise ConnectionRefusedError from None
        except StopIteration as known:
            expected, session, answer = known.value
            self.end.send(answer)
            return expected, session
        self.end.send(answer)
        self._received = b""
        return None


class Listener:
    """Accepts the connections that are expected, and drops all others.

    Handshakes run concurrently. If there are too many, the oldest one is dropped. A worker whose
    connection is dropped tries again.

    Args:
        host: the address to listen on.
        port: the port to listen on; 0 for any free port.

    Attributes:
        host: the address on which this object listens.
        port: the port on which this object listens.

    Raises:
        OSError: if ``host`` is not an address of this machine, or the port is in use.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._socket = listening(host, port)
        self._socket.setblocking(False)
        self.host, self.port = host, self._socket.getsockname()[1]
        self._expected: dict[bytes, Expected] = {}
        # Connections that are not authenticated yet, in the order of their arrival.
        self._guests: dict[socket.socket, _Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._read, self._write = os.pipe()
        self._closed = False
        self._selector.register(self._read, selectors.EVENT_READ)
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._listen, name="trawl-listener", daemon=True)
        self._thread.start()

    def expect(
        self, name: str, key: bytes, admit: Callable[[socket.socket, Session], None]
    ) -> None:
        """Accepts one connection under the given name.

        Args:
            name: name of the connection.
            key: the key that its client knows.
            admit: function that the listener's thread calls with the connection and its session.
        """
        expected = Expected(name, key, admit)
        self._expected[expected.digest] = expected

    def forget(self, name: str) -> None:
        """Stops accepting connections under the given name."""
        self._expected.pop(Expected(name, b"", _nobody).digest, None)

    def watch(self, end: socket.socket, readable: Callable[[], bool]) -> None:
        """Calls a function whenever a connection is readable.

        Only an ``admit`` function may call this method.

        Args:
            end: the connection; this object closes it.
            readable: function that the listener's thread calls; returns True to go on watching.
        """
        self._selector.register(end, selectors.EVENT_READ, lambda: self._on_readable(end, readable))

    def close(self) -> None:
        """Closes the port, unauthenticated connections, and connections that are watched."""
        if self._closed:
            return
        self._closed = True
        os.write(self._write, b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self._write)

    # --- in the thread

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj == self._read:
                    self._end()
                    return
                # Meanwhile, the connection may have been dropped, and its descriptor reused.
                if self._selector.get_map().get(key.fd) is key:
                    self._handle(key.data)
            self._drop_late()

    @staticmethod
    def _handle(event: Callable[[], None]) -> None:
        try:
            event()
        except Exception:
            # An error on one connection must not end the thread, which also serves the others.
            traceback.print_exc()

    def _patience(self) -> float | None:
        for guest in self._guests.values():
            return max(0.0, guest.deadline - time.monotonic())
        return None

    def _drop_late(self) -> None:
        now = time.monotonic()
        for guest in [one for one in self._guests.values() if one.deadline <= now]:
            self._drop(guest.end)

    def _accept(self) -> None:
        try:
            end, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            # There is no descriptor left.
            self._drop_oldest()
            time.sleep(_FULL)
            return
        if len(self._guests) == MOST_GUESTS:
            self._drop_oldest()
        end.setblocking(False)
        self._guests[end] = _Guest(end, self._expected.get)
        self._selector.register(end, selectors.EVENT_READ, lambda: self._greet(end))

    def _drop_oldest(self) -> None:
        if self._guests:
            self._drop(next(iter(self._guests)))

    def _greet(self, end: socket.socket) -> None:
        try:
            known = self._guests[end].go_on()
        except OSError:
            self._drop(end)
            return
        if known is None:
            return
        expected, session = known
        del self._guests[end]
        self._selector.unregister(end)
        if self._expected.pop(expected.digest, None) is not expected:
            # Meanwhile `forget` was called, or another connection with this name was accepted.
            end.close()
            return
        end.setblocking(True)
        try:
            expected.admit(end, session)
        except BaseException:
            end.close()
            raise

    def _on_readable(self, end: socket.socket, readable: Callable[[], bool]) -> None:
        go_on = False
        try:
            go_on = readable()
        finally:
            if not go_on:
                self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        self._guests.pop(end, None)
        self._selector.unregister(end)
        end.close()

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._read)


def _nobody(end: socket.socket, session: Session) -> None:
    end.close()
