"""Functions that are called when a collector is closed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from typing_extensions import Self


class CloseCallbacks:
    """Functions that are called once, with the collector, after it was closed.

    The functions are called by the thread that closes the collector, and must return quickly.
    """

    def __init__(self) -> None:
        # There is no lock: a signal handler or a finalizer may close the collector in the middle of
        # each method. The operations of the list are atomic.
        self._callbacks: list[Callable[[Any], object]] = []
        self._closed = False

    def add(self, callback: Callable[[Any], object], collector: Any) -> None:
        """Adds a function; if the collector is closed already, calls the function at once."""
        self._callbacks.append(callback)
        if self._closed:
            self.call(collector)

    def remove(self, callback: Callable[[Any], object]) -> None:
        """Removes a function, if it was added and not called yet."""
        with suppress(ValueError):
            self._callbacks.remove(callback)

    def call(self, collector: Any) -> None:
        """Calls all functions that were not called before."""
        self._closed = True
        while True:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return
            callback(collector)


class ClosingCollector:
    """The part of a collector that calls functions when it is closed."""

    def _init_closing(self) -> None:
        self._close_callbacks = CloseCallbacks()

    def _note_closed(self) -> None:
        """Calls the functions that were passed to :meth:`add_close_callback`."""
        self._close_callbacks.call(self)

    def add_close_callback(self, callback: Callable[[Self], object]) -> None:
        """Adds a function that is called with the collector, once the collector is closed.

        The function is called whether :meth:`shutdown`, an error, the garbage collector or the
        exit of the interpreter closes the collector, by the thread that closes it. If the
        collector is closed already, the function is called at once.

        Args:
            callback: the function. It must return quickly and raise no error.

        Examples:
            >>> from trawl import Collector
            >>> collector = Collector("CartPole-v1", frames_per_batch=10, total_frames=10)
            >>> collector.add_close_callback(lambda collector: print(collector.closed))
            >>> collector.shutdown()
            True
        """
        self._close_callbacks.add(callback, self)

    def remove_close_callback(self, callback: Callable[[Self], object]) -> None:
        """Removes a function that was added by :meth:`add_close_callback`, if it is still there."""
        self._close_callbacks.remove(callback)
