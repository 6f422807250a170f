"""Scripted services, which the tests of a backend run in its workers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from typing import Any

import numpy as np
from typing_extensions import override

from trawl.backends.base import Port, Service

# Each worker with its own interpreter has a list of its own.
TALLY: list[int] = []
# Ends the work of killed workers that are threads of the test process: it would slow down all later
# tests.
ABANDONED = threading.Event()


class Unreadable:
    """Object that can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise LookupError("this can't be read")


class OwnError(Exception):
    """Exception that can't be made again from its ``args``, so it can't be unpickled."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class ScriptedService(Service):
    """Scripted service: each message is the name of a method and its arguments.

    When the service is closed, it sends ``"closed"``.

    Args:
        port: connection to the parent.
    """

    def __init__(self, port: Port) -> None:
        self.port = port
        self.jobs: deque[tuple[Any, ...]] = deque()
        self.endless = False
        self.pieces = 0
        self.handled = 0
        self._inside = False

    @property
    @override
    def busy(self) -> bool:
        return bool(self.jobs) or self.endless

    @override
    def handle(self, content: tuple[Any, ...]) -> None:
        self._do(content)
        self.handled += 1

    @override
    def work(self) -> None:
        self.pieces += 1
        if self.jobs:
            self._do(self.jobs.popleft())
        else:
            self.port.send(("piece", self.pieces))

    @override
    def close(self) -> None:
        self.port.send("closed")

    def _do(self, order: tuple[Any, ...]) -> None:
        assert not self._inside, "called while it was still at work"
        self._inside = True
        try:
            name, *arguments = order
            getattr(self, name)(*arguments)
        finally:
            self._inside = False

    # --- methods that messages name

    def job(self, *order: Any) -> None:
        """Queues a call of a method as a piece of work."""
        self.jobs.append(order)

    def echo(self, content: Any) -> None:
        """Sends the content back."""
        self.port.send(content)

    def count(self, number: int) -> None:
        """Sends the numbers from 0 to ``number - 1``, each in a message."""
        for i in range(number):
            self.port.send(i)

    def blow(self, nbytes: int) -> None:
        """Sends ``nbytes`` bytes."""
        self.port.send(bytes(nbytes))

    def tell(self, name: str) -> None:
        """Sends the value of an attribute."""
        self.port.send(getattr(self, name))

    def run(self, endless: bool) -> None:
        """Starts or stops endless work, one small piece after another."""
        self.endless = endless

    def fail(self, text: str) -> None:
        """Raises an error."""
        raise ValueError(text)

    def fail_oddly(self, code: int) -> None:
        """Raises an error of a class with a constructor of its own."""
        raise OwnError(code=code)

    def leave(self) -> None:
        """Ends the program by ``sys.exit``."""
        sys.exit("enough")

    def vanish(self, status: int) -> None:
        """Ends the process at once, without any clean-up."""
        os._exit(status)

    def crash(self) -> None:
        """Crashes with SIGSEGV, as from a bug in native code."""
        os.kill(os.getpid(), signal.SIGSEGV)
        self.hang()

    def hang(self) -> None:
        """Works forever."""
        self.port.send("hanging")
        while not ABANDONED.is_set():
            pass

    def resist(self) -> None:
        """Works until it is stopped, and catches the exception by which that is done."""
        try:
            self.hang()
        except BaseException as error:
            self.port.send(("caught", isinstance(error, Exception)))

    def spin(self, number: int) -> None:
        """Works until an interruption with at least ``number`` is seen; sends its number."""
        self.port.send("spinning")
        while self.port.interrupted() < number:
            pass
        self.port.send(self.port.interrupted())

    def interrupted(self) -> None:
        """Sends the number of the last interruption."""
        self.port.send(self.port.interrupted())

    def send_unpicklable(self) -> None:
        """Tries to send an object that can't be pickled; then sends the type of the error."""
        try:
            self.port.send(lambda: None)
        except Exception as error:
            self.port.send(("refused", type(error).__name__))

    def send_unreadable(self) -> None:
        """Sends an object that can't be unpickled."""
        self.port.send(Unreadable())

    def fill(self, name: int, value: int) -> None:
        """Fills shared memory with a byte."""
        np.frombuffer(self.port.memory(name), np.uint8)[:] = value
        self.port.send("filled")

    def keep(self, name: int) -> None:
        """Keeps a view of shared memory."""
        self.kept = np.frombuffer(self.port.memory(name), np.uint8)

    def fill_kept(self, value: int) -> None:
        """Fills the view that was kept with a byte."""
        self.kept[:] = value
        self.port.send("filled")

    def look(self, name: int) -> None:
        """Sends the contents of shared memory; None if there is none of that name."""
        try:
            memory = self.port.memory(name)
        except KeyError:
            self.port.send(None)
        else:
            self.port.send(bytes(memory))

    def tally(self) -> None:
        """Counts its calls in a variable of the module, and sends the count."""
        TALLY.append(1)
        self.port.send(len(TALLY))


class BadlyClosed(ScriptedService):
    """Service that fails when it is closed."""

    @override
    def close(self) -> None:
        super().close()
        raise ArithmeticError("in close")


def make_failing(port: Port) -> Service:
    """Sends a message, and then fails to make a service."""
    port.send("before")
    raise ValueError("no service")


def make_hanging(port: Port) -> Service:
    """Sends a message, and then never finishes making a service."""
    port.send("making")
    while not ABANDONED.is_set():
        pass
    raise RuntimeError("abandoned")


class Maker:
    """Makes a service that first sends an object of its maker."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def __call__(self, port: Port) -> ScriptedService:
        """Sends the object, and makes the service."""
        port.send(self.what)
        return ScriptedService(port)
