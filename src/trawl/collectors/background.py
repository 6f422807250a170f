"""The thread in which a collector fills a replay buffer in the background."""

from __future__ import annotations

import atexit
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from weakref import WeakMethod, WeakSet

# Seconds that a batch under way may still take when the interpreter exits.
_AT_EXIT = 10.0
# Threads to stop at exit: an interpreter that stops a thread inside torch aborts the process.
_running: WeakSet[Background] = WeakSet()


def _stop_all() -> None:
    for background in list(_running):
        # A thread that does not stop in time waits for workers, which are ended after this.
        with suppress(TimeoutError):
            background.stop(_AT_EXIT)


class Background:
    """Calls a method repeatedly in a thread, until the method returns False.

    Args:
        turn: weak reference to the method, which does one piece of work and returns True if there
            is more. The thread does not keep the method's object alive, and ends when it is gone.
        name: name of the thread.
        ready: returns True if the next turn may begin; called again after :meth:`wake`. It must
            not keep the method's object alive.

    Attributes:
        running: True while there is more to do.
    """

    def __init__(
        self,
        turn: WeakMethod[Callable[[], bool]],
        name: str,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.running = True
        self._ready = ready
        self._turn = turn
        self._changed = threading.Condition()
        self._holders = 0
        self._busy = False
        self._owed = False
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _running.add(self)
        # Exit handlers run in reverse order: this one must run before those that close workers.
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)
        self._thread.start()

    @contextmanager
    def held(self, timeout: float | None = None) -> Iterator[None]:
        """Holds the thread within a ``with`` block; entering waits for the current turn to end.

        Blocks may be nested. In the thread itself, the block has no effect.

        Args:
            timeout: seconds to wait for that turn; None to wait as long as it takes.

        Raises:
            TimeoutError: if the turn takes longer.
        """
        if threading.current_thread() is self._thread:
            yield
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            # After a hold, a turn is due first: a caller that holds in a loop would otherwise
            # keep the thread from working.
            self._wait(
                lambda: not (self._owed and self.running and self._ready()) or self._stopping,
                deadline,
            )
            self._holders += 1
        try:
            with self._changed:
                self._wait(lambda: not self._busy, deadline)
            self.check()
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._owed = not self._holders
                self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if not self._changed.wait_for(condition, left):
            raise TimeoutError("the batch under way was not finished within the time limit")

    def stop(self, timeout: float | None = None) -> None:
        """Ends the thread after its current turn.

        Raises:
            TimeoutError: if that takes longer than ``timeout`` seconds.
        """
        self.let_go()
        if self._thread is threading.current_thread():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"collection did not stop within {timeout} s")

    def wake(self) -> None:
        """Makes the thread check again whether the next turn may begin."""
        with self._changed:
            self._changed.notify_all()

    def let_go(self) -> None:
        """Keeps the thread from beginning another turn; the current turn goes on."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raises the error that ended the thread, if there is one; only once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while self._begin_turn():
            more = False
            try:
                turn = self._turn()
                more = turn is not None and turn()
                # Between turns the thread must not keep the collector alive.
                del turn
            except BaseException as error:
                # Printed now, as no caller waits for this thread; the next call raises it.
                self._error, self.running = error, False
                traceback.print_exception(error)
            finally:
                self._end_turn(more)

    def _begin_turn(self) -> bool:
        with self._changed:
            # Callers that want to hold come first: the thread would win every race for a lock.
            self._changed.wait_for(lambda: self._stopping or (not self._holders and self._ready()))
            self._owed = False
            self.running = self._busy = self.running and not self._stopping
            return self._busy

    def _end_turn(self, more: bool) -> None:
        with self._changed:
            self.running = more
            self._busy = False
            self._changed.notify_all()
