"""Code that runs in the process of a worker that is reached over a network."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from trawl.backends.base import Service
from trawl.backends.processes.loop import NOTHING, Breaker, Stopped, WorkerLoop
from trawl.extras.clusters.launching.authentication import AuthenticationError
from trawl.extras.clusters.network.control import ANSWERS, SIGNALS, Rendezvous, WorkerConnection
from trawl.extras.clusters.network.frames import (
    ENDED,
    FAILED,
    INTERRUPT,
    KILL,
    MESSAGE,
    STOP,
    Frame,
    pack,
)
from trawl.extras.clusters.network.link import Address

# Seconds that a worker whose driver is gone may take to close its environments, and that a worker
# that has ended waits for its driver to close the connection.
_CLOSING = 5.0
# Name under which the store has the address at which a rank connects to its driver.
RENDEZVOUS = "rendezvous"


def run_rank_at(address: Address) -> int:
    """Joins the driver that waits at an address, and works for it; returns the exit status.

    Args:
        address: the address, with the key that this process shares with the driver.
    """
    # The store is not trusted: the process at this address must prove that it knows the key.
    host, port = address.names().get(RENDEZVOUS).decode().rsplit(" ", 1)
    rendezvous = Rendezvous(host, int(port), address.prefix, address.key, address.timeout)
    with contextlib.ExitStack() as stack:
        requests = stack.enter_context(contextlib.closing(rendezvous.connect()))
        try:
            link_timeout = requests.next().content()
            signals = stack.enter_context(contextlib.closing(rendezvous.connect(SIGNALS)))
            answers = stack.enter_context(contextlib.closing(rendezvous.connect(ANSWERS)))
        except (EOFError, ConnectionError):
            raise RuntimeError(f"the driver at {host}:{port} is gone") from None
        if link_timeout is not None:
            requests.keep_alive(link_timeout)
            signals.keep_alive(link_timeout, strictly=True)
        return Rank(requests, signals, answers).live()


class Rank(WorkerLoop):
    """Loop of a worker that is reached over a network.

    A separate thread reads signals, so a worker can be stopped while it works. The thread that does
    the work reads requests itself.

    Args:
        requests: the connection for requests.
        signals: the connection for signals.
        answers: the connection for messages to the driver.
    """

    def __init__(
        self,
        requests: WorkerConnection,
        signals: WorkerConnection,
        answers: WorkerConnection,
    ) -> None:
        super().__init__(Breaker())
        self._breaker.wake = requests.ring
        self._requests = requests
        self._signals = signals
        self._answers = answers
        self._interruption = 0, 0
        self._losing, self._interrupting = threading.Lock(), threading.Lock()
        # Any thread of an environment may issue a warning, which is then sent to the driver.
        self._talking = threading.Lock()
        self._lost = threading.Event()
        self._last: threading.Timer | None = None
        self._over = False

    # --- in the thread that reads signals

    def _obey(self) -> None:
        with contextlib.suppress(EOFError, AuthenticationError):
            while True:
                self._signalled(self._signals.next())
        self._driver_lost()

    def _signalled(self, frame: Frame) -> None:
        if frame.verb == INTERRUPT:
            self._interrupt(frame.content())
        elif frame.verb == KILL:
            self._breaker.kill()
        elif frame.verb == STOP:
            with self._losing:
                if not self._over:
                    self._break_off()

    def _interrupt(self, interruption: tuple[int, int]) -> None:
        # Interruptions come over both connections.
        with self._interrupting:
            if interruption[1] > self._interruption[1]:
                self._interruption = interruption

    def _driver_lost(self) -> None:
        """Ends this worker, because the driver is gone or has closed the connection."""
        with self._losing:
            self._lost.set()
            self._answers.hang_up()
            if self._over:
                return
            self._last = threading.Timer(_CLOSING, self._breaker.kill)
            self._last.daemon = True
            self._last.start()
            self._break_off()

    def _break_off(self) -> None:
        # `stop` aborts the current work, unless the running code catches the exception. Even then,
        # `ring` makes sure that the worker reads no further request.
        self._requests.ring()
        self._breaker.stop()

    # --- in the thread that works

    @override
    def send(self, content: Any) -> None:
        self._send_frame(pack(MESSAGE, content))

    def _send_frame(self, frame: Frame) -> None:
        if not self._breaker.is_current:
            # This is a thread of an environment, where `Stopped` must not be raised.
            with contextlib.suppress(RuntimeError):
                self._transmit(frame)
            return
        # If sending were aborted halfway, the driver would take the next message for the rest of
        # this one.
        with self._breaker.shielded(), _stopped_by_loss():
            self._transmit(frame)

    def _transmit(self, frame: Frame) -> None:
        with self._talking:
            self._answers.send(frame)

    @override
    def interrupted(self) -> int:
        return self._interruption[0]

    def live(self) -> int:
        """Runs the worker; returns its exit status."""
        reader = threading.Thread(target=self._obey, daemon=True)
        try:
            with self.stoppable():
                reader.start()
                status = self._live()
            # Waits until the driver closes the connection.
            self._lost.wait(_CLOSING)
        finally:
            self._over = True
            self._signals.ring()
            if reader.is_alive():
                reader.join()
        return status

    def _live(self) -> int:
        failure = self.run()
        status = 0 if failure is None else 1
        with contextlib.suppress(Stopped):
            if failure is not None:
                self._send_frame(pack(FAILED, failure))
            self._send_frame(pack(ENDED, status))
        with self._losing:
            # From now on, signals to stop must not reach the program that runs this rank.
            self._over = True
        if self._last is not None:
            self._last.cancel()
        return status

    @override
    def make_service(self) -> Service:
        path, make = self._read()
        sys.path += [entry for entry in path if entry not in sys.path]
        service: Service = pickle.loads(make)(self)
        return service

    @override
    def next_message(self, wait: bool) -> Any:
        return self._read() if wait or self._requests.waiting else NOTHING

    def _read(self) -> Any:
        try:
            content, interruption = self._requests.next().content()
        except EOFError:
            raise Stopped from None
        self._interrupt(interruption)
        return content


@contextmanager
def _stopped_by_loss() -> Iterator[None]:
    """Context that raises ``Stopped`` if the driver is gone."""
    try:
        yield
    except RuntimeError:
        raise Stopped from None
