"""Functions that are called when a collector is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class CloseCallbacks:
    """Functions that are called once, with the collector, after it was closed.

    The functions are called by the thread that closes the collector, and must return quickly.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Any], object]] | None = []

    def add(self, callback: Callable[[Any], object], collector: Any) -> None:
        """Adds a function; if the collector is closed already, calls the function at once."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback(collector)

    def remove(self, callback: Callable[[Any], object]) -> None:
        """Removes a function, if it was added and not called yet."""
        with self._lock:
            if self._callbacks is not None and callback in self._callbacks:
                self._callbacks.remove(callback)

    def call(self, collector: Any) -> None:
        """Calls all functions, unless they were called before."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(collector)
