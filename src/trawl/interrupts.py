"""Ctrl-C while a batch is being collected: it takes effect at a point where nothing gets lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from trawl.foreign.python import set_signal_handler

# False if C code has set a handler, which Python code can replace, but not restore.
_can_restore = signal.getsignal(signal.SIGINT) is not None


class DeferredInterrupt:
    """Context in which the first Ctrl-C waits for a safe point, and the second acts at once.

    Within the context, SIGINT calls the handler that the program has set, as always. If the handler
    raises an exception at the first signal, such as ``KeyboardInterrupt``, the exception is kept.
    Code within the context raises it by :func:`check_interrupt` where nothing gets lost; if there
    was no such point, whoever made the context raises it afterwards.

    The context does nothing in threads other than the main one, and if SIGINT is ignored. Within
    another context, there are no safe points, because code of the program may be under way.

    Attributes:
        pending: the exception that was kept, or None.
        depth: number of further contexts that the thread is in within this one.
    """

    def __init__(self) -> None:
        self.pending: BaseException | None = None
        self._handler: Callable[[int, Any], Any] | None = None
        self._early = self._came = self._again = False
        self._owner = os.getpid()
        self._pauses: Callable[[], object] | None = None
        self._outer: DeferredInterrupt | None = None
        self.depth = 0

    def __enter__(self) -> DeferredInterrupt:
        global _current
        if threading.current_thread() is not threading.main_thread():
            return self
        if _current is not None:
            self._outer = _current
            _current.depth += 1
        elif _can_restore:
            # To ask for the program's handler first would take as long again.
            found = set_signal_handler(signal.SIGINT, self._signalled)
            if callable(found):
                self._handler, _current = found, self
            else:
                # None stands for a handler that C code has set since, and that is lost now.
                found = signal.default_int_handler if found is None else found
                set_signal_handler(signal.SIGINT, found)
            if self._early:
                signal.raise_signal(signal.SIGINT)
        return self

    def __exit__(self, *exc_info: object) -> None:
        global _current
        if self._outer is not None:
            self._outer.depth -= 1
        elif self._handler is not None:
            # From now on, the program's handler may raise an exception here.
            _current = None
            found = set_signal_handler(signal.SIGINT, self._handler)
            if found != self._signalled:
                # Code within the context has set another handler.
                set_signal_handler(signal.SIGINT, found)

    def _signalled(self, signum: int, frame: Any) -> None:
        if self._handler is None:
            # The signal came before the program's handler was known.
            self._early = True
            return
        if self._came or os.getpid() != self._owner:
            self._again = True
            self._handler(signum, frame)
            return
        self._came = True
        try:
            self._handler(signum, frame)
        except BaseException as error:
            if self._again:  # the second signal came while the first was handled
                raise
            self.pending = error.with_traceback(None)
            if self._pauses is not None:
                self._pauses()

    def pauses(self, work: Callable[[], object] | None) -> None:
        """Sets the function that is called, in the signal handler, when Ctrl-C is pressed."""
        self._pauses = work


# The context that the main thread is in.
_current: DeferredInterrupt | None = None


def current_interrupt() -> DeferredInterrupt | None:
    """Returns the context whose exception may be raised in this thread now, or None."""
    if _current is None or threading.current_thread() is not threading.main_thread():
        return None
    return None if _current.depth else _current


def check_interrupt() -> None:
    """Raises the exception that Ctrl-C has caused, if this thread is in a context.

    Called where an exception loses nothing.
    """
    current = current_interrupt()
    if current is not None and current.pending is not None:
        raise current.pending


def may_interrupt() -> bool:
    """Returns True if :func:`check_interrupt` may raise an exception."""
    return current_interrupt() is not None


def is_deferred(error: BaseException) -> bool:
    """Returns True for an exception that :func:`check_interrupt` raised."""
    return _current is not None and error is _current.pending
