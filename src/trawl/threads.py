"""Threads that are stopped when the interpreter exits."""

from __future__ import annotations

import atexit
from contextlib import suppress
from typing import Any
from weakref import WeakSet

# Seconds that a thread may take to finish its current work when the interpreter exits.
_AT_EXIT = 10.0
# Threads to stop at exit. If the interpreter stops a thread inside torch, the process aborts.
_running: WeakSet[Any] = WeakSet()


def _stop_all() -> None:
    for thread in list(_running):
        # A thread that does not stop in time is waiting for workers, which later exit handlers end.
        with suppress(Exception):
            thread.stop(_AT_EXIT)


def stop_at_exit(thread: Any) -> None:
    """Calls ``thread.stop(timeout)`` when the interpreter exits, if the object still exists."""
    _running.add(thread)
    # Exit handlers run in reverse order: this one must run before those that close workers.
    atexit.unregister(_stop_all)
    atexit.register(_stop_all)
