"""Services that do as they are told: what the tests of a backend run in its workers."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from typing import Any

import numpy as np
from typing_extensions import override

from trawl.backends.base import Port, Service

# What a worker of its own interpreter has of this for itself.
TALLY: list[int] = []


class Unreadable:
    """It can be pickled, and what comes of that can't be read."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise LookupError("this can't be read")


class OwnError(Exception):
    """An exception that a copy can't be made of by its arguments."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Puppet(Service):
    """A service that does what messages tell: each is the name of a method, and its arguments.

    When it is closed, it sends ``"closed"``.

    Args:
        port: the connection to its parent.
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

    # --- what it can do

    def job(self, *order: Any) -> None:
        """Does something as a piece of work, when its turn comes."""
        self.jobs.append(order)

    def echo(self, content: Any) -> None:
        """Sends it back."""
        self.port.send(content)

    def count(self, number: int) -> None:
        """Sends numbers, from 0."""
        for i in range(number):
            self.port.send(i)

    def blow(self, nbytes: int) -> None:
        """Sends so many bytes."""
        self.port.send(bytes(nbytes))

    def tell(self, name: str) -> None:
        """Sends the value of an attribute."""
        self.port.send(getattr(self, name))

    def run(self, endless: bool) -> None:
        """Works without end, one small piece after another; or no more."""
        self.endless = endless

    def fail(self, text: str) -> None:
        """Raises an error."""
        raise ValueError(text)

    def fail_oddly(self, code: int) -> None:
        """Raises an error of a class with a constructor of its own."""
        raise OwnError(code=code)

    def leave(self) -> None:
        """Ends as programs end themselves."""
        sys.exit("enough")

    def vanish(self, status: int) -> None:
        """Ends the process, with nothing done first."""
        os._exit(status)

    def crash(self) -> None:
        """Ends as by a bug in native code."""
        os.kill(os.getpid(), signal.SIGSEGV)
        self.hang()

    def hang(self) -> None:
        """Works, and finds no end."""
        self.port.send("hanging")
        while True:
            pass

    def resist(self) -> None:
        """Works, and catches whatever it is to be stopped by, once."""
        try:
            self.hang()
        except BaseException as error:
            self.port.send(("caught", isinstance(error, Exception)))

    def spin(self, number: int) -> None:
        """Works until an interruption of a number is seen; sends what was seen then."""
        self.port.send("spinning")
        while self.port.interrupted() < number:
            pass
        self.port.send(self.port.interrupted())

    def interrupted(self) -> None:
        """Sends the number of the last interruption."""
        self.port.send(self.port.interrupted())

    def send_unpicklable(self) -> None:
        """Sends what can't be sent; and then the type of the error that was."""
        try:
            self.port.send(lambda: None)
        except Exception as error:
            self.port.send(("refused", type(error).__name__))

    def send_unreadable(self) -> None:
        """Sends what can't be read."""
        self.port.send(Unreadable())

    def fill(self, name: int, value: int) -> None:
        """Writes a byte all over shared memory."""
        np.frombuffer(self.port.memory(name), np.uint8)[:] = value
        self.port.send("filled")

    def keep(self, name: int) -> None:
        """Keeps a view of shared memory."""
        self.kept = np.frombuffer(self.port.memory(name), np.uint8)

    def fill_kept(self, value: int) -> None:
        """Writes to the view that was kept."""
        self.kept[:] = value
        self.port.send("filled")

    def look(self, name: int) -> None:
        """Sends what is in shared memory; None if there is none of that name."""
        try:
            memory = self.port.memory(name)
        except KeyError:
            self.port.send(None)
        else:
            self.port.send(bytes(memory))

    def tally(self) -> None:
        """Counts, in a variable of the module, how often this was called."""
        TALLY.append(1)
        self.port.send(len(TALLY))


class BadlyClosed(Puppet):
    """A service that fails when it is closed."""

    @override
    def close(self) -> None:
        super().close()
        raise ArithmeticError("in close")


def make_failing(port: Port) -> Service:
    """Makes no service."""
    port.send("before")
    raise ValueError("no service")


def make_hanging(port: Port) -> Service:
    """Makes no service, for ever."""
    port.send("making")
    while True:
        pass


class Maker:
    """Makes a service that has something of its maker."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def __call__(self, port: Port) -> Puppet:
        """Makes the service; what it has is the first message."""
        port.send(self.what)
        return Puppet(port)
