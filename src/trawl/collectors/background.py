"""Collecting in the background, into a replay buffer."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Background:
    """Runs a function again and again in a thread, until it says that there is no more to do.

    Args:
        turn: does one piece of work; returns whether there is more.
        name: name of the thread.
    """

    def __init__(self, turn: Callable[[], bool], name: str) -> None:
        self._turn = turn
        self._gate = threading.Lock()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread is at work."""
        return self._thread.is_alive()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it the thread does nothing; entering waits for the turn it is at."""
        with self._gate:
            self.check()
            yield

    def stop(self, timeout: float | None = None) -> None:
        """Ends the thread after the turn that it is at.

        Raises:
            TimeoutError: if that takes longer than ``timeout`` seconds.
        """
        self._stop.set()
        if self._thread is threading.current_thread():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"collection did not stop within {timeout} s")

    def check(self) -> None:
        """Raises what ended the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            more = True
            while more and not self._stop.is_set():
                with self._gate:
                    more = not self._stop.is_set() and self._turn()
        except BaseException as error:
            # Shown now, and raised at the next call: nobody is waiting for this thread.
            self._error = error
            traceback.print_exception(error)
