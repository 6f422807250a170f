"""The time in which a collector is open, and functions that are called at its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Lifetime:
    """The time from a collector's construction to its end.

    Functions can be added that are called once, with the collector, after it was closed. They are
    called by the thread that closes the collector, and must return quickly.

    Attributes:
        closed: True once the collector has been shut down.
        failed: True if an error has ended the collection.
    """

    def __init__(self) -> None:
        self.closed = self.failed = False
        self._cause = ""  # the error that closed the collector, as the end of a message
        # There is no lock: a signal handler or a finalizer may close the collector in the middle of
        # each method. The operations of the list are atomic.
        self._callbacks: list[Callable[[Any], object]] = []
        self._told = False

    def check_open(self, what: str) -> None:
        """Raises a ``RuntimeError`` if the collector was closed.

        Args:
            what: what was called, for the message.
        """
        if self.closed:
            raise RuntimeError(f"{what} failed because the collector was shut down{self._cause}")

    def name_cause(self, error: BaseException) -> None:
        """Names an error as the cause of the end."""
        # Only the first line: the text of a worker's error contains a traceback.
        self._cause = f" after {type(error).__name__}: {error}".splitlines()[0].rstrip(": ")

    def add(self, callback: Callable[[Any], object], collector: Any) -> None:
        """Adds a function; if the collector is closed already, calls the function at once."""
        self._callbacks.append(callback)
        if self._told:
            self.tell(collector)

    def remove(self, callback: Callable[[Any], object]) -> None:
        """Removes a function, if it was added and not called yet."""
        with suppress(ValueError):
            self._callbacks.remove(callback)

    def tell(self, collector: Any) -> None:
        """Calls all functions that were not called before."""
        self._told = True
        while True:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return
            callback(collector)
